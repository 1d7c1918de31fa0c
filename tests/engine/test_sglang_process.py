"""What the trainer gives to SGLang's process, without SGLang: its seed, its variables, its buckets, and what is said when it is missing."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybrid_rl.config import Config, Deterministic, EngineConfig, EngineKind
from hybrid_rl.engine import make
from hybrid_rl.engine.base import EngineDied, EngineError
from hybrid_rl.engine.sglang import engine as sglang_engine
from hybrid_rl.engine.sglang import interface
from hybrid_rl.engine.sglang.process import HostProcess, environment
from hybrid_rl.engine.sglang.weights import payload
from hybrid_rl.policy.model import Policy
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.session import build_engine
from tests.ranks import on_ranks

CHANGES_RESULTS = {
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "a:b",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "SGLANG_MAX_NEW_TOKENS_LIMIT": "3", "SGL_RADIX_FORCE_MISS": "1", "SGLANG_GRPC_PORT": "1",
    "TMS_INIT_ENABLE_CPU_BACKUP": "1", "SGLANG_NOT_YET_INVENTED": "1",
}  # fmt: skip
OF_THE_LAUNCHER = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
OF_THE_MACHINE = {
    "SGLANG_CACHE_DIR": "/cache",
    "SGLANG_USE_CPU_ENGINE": "1",
    "CUDA_VISIBLE_DEVICES": "3",
    "HF_HUB_OFFLINE": "1",
}


def test_its_process_sees_no_variable_that_changes_results(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(interface.SWITCHES)]:
        monkeypatch.delenv(name)
    assert interface.withheld() == []
    for name, value in (CHANGES_RESULTS | OF_THE_LAUNCHER | OF_THE_MACHINE).items():
        monkeypatch.setenv(name, value)
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    seen = json.loads(
        subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True).stdout
    )
    assert not seen.keys() & (CHANGES_RESULTS | OF_THE_LAUNCHER).keys()
    assert seen.items() >= OF_THE_MACHINE.items()
    assert interface.withheld() == sorted(CHANGES_RESULTS)


class Recorded:
    """In place of SGLang's process: the arguments that it would have been started with."""

    dead, timeout = True, 1.0
    facts = {"input": 10_000, "tokens": 10_000}  # noqa: RUF012

    def __init__(self, arguments, start_timeout, timeout, log):
        seen.append(arguments["random_seed"])

    def close(self):
        pass


seen: list[int] = []


def seeds_of(ranks: Ranks, folder: Path, width: int, run_seed: int = 0, **arguments: int) -> list[int]:
    """The seeds of a rank's engine, at its start and after each of two restarts."""
    seen.clear()
    make.unusable = sglang_engine.unusable = lambda: None
    sglang_engine.HostProcess = Recorded
    config = Config(
        seed=run_seed, engine=EngineConfig(kind=EngineKind.sglang, tensor_parallel=width, arguments=arguments)
    )
    config.engine.deterministic = Deterministic.never
    engine = build_engine(config, Policy.load(folder, torch.device("cpu"), None, ranks))
    engine.restart()
    engine.restart()
    return list(seen)


@pytest.mark.slow
def test_every_engine_and_every_restart_has_a_seed_of_its_own(tiny_folder: Path) -> None:
    """Within numpy's range; the processes of a team have one, that of the rank that starts them."""
    runs = [on_ranks(2, seeds_of, tiny_folder, 1, seed) for seed in (0, 1)]
    all_seeds = [seed for ranks in runs for seeds in ranks for seed in seeds]
    assert len(set(all_seeds)) == len(all_seeds) == 2 * 2 * 3
    assert all(0 <= seed < 2**32 for seed in all_seeds)
    first, second = on_ranks(2, seeds_of, tiny_folder, 2, 0)
    assert first == runs[0][0]
    assert second == []


def test_completions_longer_than_sglang_has_room_for_are_refused(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path
) -> None:
    monkeypatch.setattr(sglang_engine, "unusable", lambda: None)
    monkeypatch.setattr(sglang_engine, "HostProcess", Recorded)
    with pytest.raises(EngineError, match="completions of 10001 tokens, prompt included: SGLang has room for 10000"):
        sglang_engine.SGLangEngine(tiny_folder, frozenset([257]), 8, 10_001)


def test_a_bucket_is_read_back_as_it_was_sent() -> None:
    """Cut as SGLang cuts it, by the fields of its description; the pickle names nothing of SGLang."""
    named = [("a", torch.randn(3, 5)), ("b", torch.randn(7).double()), ("counts", torch.arange(4))]
    sent = payload(named, torch.device("cpu"), torch.bfloat16)
    assert b"sglang" not in sent
    bucket = pickle.load(io.BytesIO(sent))  # noqa: S301
    flat = bucket["flattened_tensor"]
    read = {m.name: flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape) for m in bucket["metadata"]}
    assert sorted(read) == ["a", "b", "counts"]
    for name, tensor in named:
        assert torch.equal(read[name], tensor.bfloat16() if tensor.is_floating_point() else tensor)
    assert {m.name: m.numel for m in bucket["metadata"]} == {"a": 30, "b": 14, "counts": 32}  # bytes


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, r"SGLang is not installed; pip install -e '\.\[sglang\]', or engine=local"),
        ("0.5.20", "SGLang 0.5.20 is too old, 0.5.21 or newer is needed"),
        ("0.5.21", None),
        ("0.5.23.post1", None),
        ("0.6.0rc1", None),
        ("0.0.0.dev1+gabc", None),  # of a checkout: its names are looked at when it starts
        ("of an unknown version", None),
    ],
)
def test_a_version_that_cannot_work_is_known_before_anything_loads(
    monkeypatch: pytest.MonkeyPatch, tiny_folder, version, said
) -> None:
    monkeypatch.setattr(interface, "installed", lambda: version)
    assert (interface.unusable() is None) == (said is None)
    if said:
        with pytest.raises(EngineError, match=said):
            sglang_engine.SGLangEngine(tiny_folder, frozenset([1]), 1, 8)
        assert make.choose_engine(EngineKind.auto, torch.device("cuda")) == EngineKind.local


@pytest.fixture
def broken_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name whose import fails, as one does whose kernels do not fit."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text(
        "raise ImportError('libcudart.so.13: cannot open\\nshared object file')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_one_that_cannot_be_imported_is_one_line_and_a_log(broken_sglang, tmp_path: Path) -> None:
    log = tmp_path / "engine_0.log"
    for already in ("", "of a start before\n"):
        log.write_text(already)
        with pytest.raises(EngineError) as error:
            HostProcess({}, 60.0, 60.0, log)
        assert str(error.value).startswith("SGLang ")
        assert str(error.value).endswith(
            f"did not start (engine=local runs without it): ImportError: libcudart.so.13: cannot open; its output is in {log}"
        )
        assert log.read_text().startswith(already + "Traceback")
        assert "shared object file" in error.value.__notes__[0]
        assert "of a start before" not in error.value.__notes__[0]
    assert not isinstance(error.value, EngineDied)  # nothing would come of starting it again


@pytest.mark.slow
def test_a_run_says_it_in_one_line(broken_sglang, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "hybrid_rl.run",
        "+recipe=reverse",
        "engine=sglang",
        "ranks=2",
        f"output_dir={tmp_path}",
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    said = [line for line in (result.stdout + result.stderr).splitlines() if "SGLang" in line]
    assert result.returncode == 1
    assert len(said) == 1
    assert "Traceback" not in result.stdout + result.stderr
    assert said[0].startswith("hybrid_rl: SGLang")
    assert "ImportError: libcudart.so.13" in said[0]
