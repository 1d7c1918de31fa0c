"""The engine contract against the real SGLang, on the CPU: `make test-sglang`."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed here; `make test-sglang` installs it for the CPU", allow_module_level=True)

from hybrid_rl.config import EngineKind
from hybrid_rl.engine.base import KV_CACHE, WEIGHTS, EngineError, EngineStats, Request, Sampling
from hybrid_rl.engine.make import choose_engine
from hybrid_rl.engine.sglang.engine import SGLangEngine
from hybrid_rl.policy.model import Policy
from tests.engine_contract import PROMPTS, EngineContract, checkpoint, collect, requests, tokens

KV_TOKENS = 65536  # 32 MiB in the tiny models: enough to be seen in the memory of a process
SUPPORTED = ["qwen3", "staggered", "llama", "qwen2", "granite", "phi3"]
ALIVE = 8  # engines at a time; those that wait use no processor


def start(folder: Path, slots: int = 8, capacity: int = 64) -> SGLangEngine:
    policy = Policy.load(folder, torch.device("cpu"))
    engine = SGLangEngine(folder, policy.end_ids(), slots, capacity, extra={"max_total_tokens": KV_TOKENS})
    engine.set_version(0)
    return engine


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[tuple, SGLangEngine]]:
    kept: dict[tuple, SGLangEngine] = {}
    yield kept
    with ThreadPoolExecutor() as pool:  # each takes its seconds
        list(pool.map(SGLangEngine.close, kept.values()))


@pytest.fixture
def make_engine(engines: dict[tuple, SGLangEngine]) -> Callable[..., SGLangEngine]:
    """An engine as new: started, or one from before that was given its folder's weights again."""

    def make(folder: Path, slots: int = 8, capacity: int = 64) -> SGLangEngine:
        key = (folder, slots, capacity)
        engine = engines.pop(key, None)
        if engine is not None and not engine._host.dead:
            engine.abort()
            engine.wake([KV_CACHE, WEIGHTS])
            engine.update_weights([checkpoint(folder)], version=0)
            engine.stats = EngineStats()
        else:
            engine = start(folder, slots, capacity)
        engines[key] = engine  # now the one used last
        while len(engines) > ALIVE:
            engines.pop(next(iter(engines))).close()
        return engine

    return make


class TestSGLangEngine(EngineContract):
    rounding = 1e-5  # requests arrive one by one, so batches differ from run to run
    memory_tolerance = 0.05  # what processes have in memory, pages of other things included

    @pytest.fixture(params=SUPPORTED)
    def any_folder(self, request: pytest.FixtureRequest, folder_of) -> Path:
        return folder_of(request.param)

    @pytest.mark.parametrize("name", ["qwen3", "llama", "phi3"])  # embeddings tied, untied, untied
    def test_after_new_weights_nothing_of_the_old_ones_is_left(self, make_engine, folder_of, name: str) -> None:
        super().test_after_new_weights_nothing_of_the_old_ones_is_left(make_engine, folder_of, name)

    def test_a_groups_prompt_is_computed_once(self, engine: SGLangEngine) -> None:
        """And with it, in SGLang, the last token of each request's."""
        out = collect(engine, requests(size=16), Sampling(max_tokens=3))  # 80 requests through 8 slots
        lengths = [len(p) for p in PROMPTS]
        assert engine.stats.prompt_tokens == 16 * sum(lengths)
        assert engine.stats.computed_prompt_tokens == sum(n for n in lengths if n > 1) + 16 * len(lengths)
        assert engine.stats.sampled_tokens == sum(len(c.token_ids) for c in out.values())

    def test_an_abort_while_prompts_are_computed(self, engine: SGLangEngine) -> None:
        expected = tokens(collect(engine, requests(size=16), Sampling(max_tokens=8)))
        engine.set_version(0)
        for _ in range(3):
            engine.generate(requests(size=16), Sampling(max_tokens=8))
            aborted = engine.abort()
            assert sorted(c.id for c in aborted) == list(range(80))
            assert all(c.token_ids == expected[c.id][: len(c.token_ids)] for c in aborted)
        assert tokens(collect(engine, requests(size=16), Sampling(max_tokens=8))) == expected

    def test_waking_one_tag_leaves_the_other_asleep(self, make_engine, tiny_folder: Path) -> None:
        """Weights that slept are gone, and sampling from what is there instead is refused."""
        engine = make_engine(tiny_folder)
        engine.sleep([KV_CACHE, WEIGHTS])
        with pytest.raises(EngineError, match="weights sleep"):
            engine.update_weights([checkpoint(tiny_folder)], version=1)
        engine.wake([WEIGHTS])
        with pytest.raises(EngineError, match="update_weights"):
            engine.generate(requests(), Sampling(max_tokens=2))
        engine.update_weights([checkpoint(tiny_folder)], version=1)
        with pytest.raises(EngineError, match="kv_cache"):
            engine.generate(requests(), Sampling(max_tokens=2))
        engine.wake([KV_CACHE, WEIGHTS])
        assert len(collect(engine, requests(), Sampling(max_tokens=2))) == 20
        for call in (engine.sleep, engine.wake):
            with pytest.raises(EngineError, match="cuda_graph"):
                call(["cuda_graph"])


def test_twenty_turns_change_no_token_and_keep_no_memory(make_engine, folder_of) -> None:
    """Sleep, wake and new weights, two sets of them by turns: the greedy tokens are each set's own, and its processes do not grow."""
    sampling, sets = Sampling(temperature=0.0, max_tokens=8), [checkpoint(folder_of("llama", seed=seed)) for seed in (0, 1)]
    engine, resident, seen = make_engine(folder_of("llama")), [], ([], [])
    for version in range(1, 21):
        engine.sleep([KV_CACHE, WEIGHTS])
        engine.wake([WEIGHTS])
        engine.update_weights([sets[version % 2]], version)
        engine.wake([KV_CACHE])
        out = collect(engine, requests(size=2), sampling)
        seen[version % 2].append(tokens(out))
        assert {tuple(c.versions) for c in out.values()} == {((version, 8),)}
        resident.append(engine._host.resident())
    assert all(out == each[0] for each in seen for out in each)
    assert seen[0][0] != seen[1][0]
    assert min(resident[-5:]) - min(resident[2:7]) < 16 * 2**20


@pytest.mark.parametrize("ids", [[5, 100_000], [-1], [320]], ids=str)
def test_an_id_outside_the_vocabulary_is_refused(make_engine, tiny_folder: Path, ids: list[int]) -> None:
    engine = make_engine(tiny_folder)
    for request in (Request(3, ids, 0), Request(3, [1], 0, ids, [-1.0] * len(ids), [(0, len(ids))])):
        with pytest.raises(EngineError, match=r"request 3 .*vocabulary"):
            engine.generate([*requests(), request], Sampling(max_tokens=4))
    assert len(collect(engine, requests(), Sampling(max_tokens=4))) == 20


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen2", "phi3"])
def test_weights_come_back_under_the_checkpoints_names(make_engine, folder_of, name: str) -> None:
    engine, new = make_engine(folder_of(name)), checkpoint(folder_of(name, seed=1))
    engine.update_weights([new], version=1)
    held = engine.weights()
    assert new.keys() <= held.keys()
    assert all(torch.equal(held[key], tensor) for key, tensor in new.items())


def test_a_tied_weight_may_come_under_its_other_name(make_engine, folder_of) -> None:
    engine, new = make_engine(folder_of("qwen3")), checkpoint(folder_of("qwen3", seed=1))
    other = {name if name != "model.embed_tokens.weight" else "lm_head.weight": tensor for name, tensor in new.items()}
    engine.update_weights([other], version=1)
    assert all(torch.equal(engine.weights()[key], tensor) for key, tensor in other.items())
    assert tokens(collect(engine, requests(), Sampling(max_tokens=4))) == tokens(
        collect(make_engine(folder_of("qwen3", seed=1)), requests(), Sampling(max_tokens=4))
    )


@pytest.mark.parametrize("name", ["gemma", "qwen3_moe"])
def test_a_model_that_could_not_be_compared_is_refused(folder_of, name: str) -> None:
    with pytest.raises(EngineError, match=f"{name} in another form.*engine=local"):
        SGLangEngine(folder_of(name), frozenset([257]), 8, 64)


@pytest.mark.parametrize("victim", ["scheduler", "host"])
@pytest.mark.parametrize("moment", ["idle", "sampling"])
def test_a_dead_engine_is_an_error_and_hurts_nobody(tiny_folder: Path, victim: str, moment: str) -> None:
    engine, bystander = start(tiny_folder), subprocess.Popen(["sleep", "600"])
    try:
        stream = engine.generate(requests(), Sampling(max_tokens=30)) if moment == "sampling" else None
        host = psutil.Process(engine._host.pid)
        family = [host, *host.children(recursive=True)]
        os.kill(next(p.pid for p in family if "scheduler" in p.name()) if victim == "scheduler" else host.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="has ended"):
            list(stream) if stream else engine.update_weights([checkpoint(tiny_folder)], 1)
        for call in (lambda: engine.generate(requests(), Sampling()), engine.sleep, lambda: engine.set_version(3)):
            with pytest.raises(EngineError, match="has ended"):
                call()
        psutil.wait_procs(family, timeout=20)
        assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        engine.close()
        assert bystander.poll() is None
    finally:
        engine.close()
        bystander.kill()
        bystander.wait()


def test_close_ends_its_own_processes_alone(tiny_folder: Path) -> None:
    engine, bystander = start(tiny_folder), subprocess.Popen(["sleep", "600"])
    host = psutil.Process(engine._host.pid)
    family = [host, *host.children(recursive=True)]
    assert len(family) >= 2
    engine.close()
    engine.close()
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert bystander.poll() is None
    with pytest.raises(EngineError, match="closed"):
        engine.generate(requests(), Sampling())
    bystander.kill()
    bystander.wait()


def test_a_process_that_is_killed_leaves_no_engine_behind(tiny_folder: Path) -> None:
    program = (
        "import sys, time\nfrom hybrid_rl.engine.sglang.engine import SGLangEngine\n"
        f"engine = SGLangEngine({str(tiny_folder)!r}, frozenset([257]), 4, 64)\nprint(engine._host.pid, flush=True)\ntime.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    host = psutil.Process(int(owner.stdout.readline()))
    family = [host, *host.children(recursive=True)]
    owner.kill()
    owner.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive


def test_what_does_not_start_says_why(tiny_folder: Path) -> None:
    with pytest.raises(EngineError, match="room for"):
        SGLangEngine(tiny_folder, frozenset([257]), 4, 100_000)
    with pytest.raises(EngineError, match="no_such_argument"):
        SGLangEngine(tiny_folder, frozenset([257]), 4, 64, extra={"no_such_argument": 1})


def test_a_recipe_trains_with_it(tmp_path: Path) -> None:
    """Whole runs of the command: every handover is verified, and what the engine sampled has the trainer's probabilities."""
    command = [sys.executable, "-m", "hybrid_rl.run", "+recipe=reverse", "engine=sglang", "handover.verify=true", f"output_dir={tmp_path}"]
    small = [
        "sft.steps=4",
        "rl.steps=3",
        "rl.max_empty_steps=0",
        "eval.max_tasks=4",
        "rollout.batch_size=16",
        "rollout.group_size=4",
        "rollout.max_tokens=24",
    ]
    result = subprocess.run([*command, *small], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "engine sglang" in result.stdout
    (metrics,) = tmp_path.glob("reverse/*/metrics.jsonl")
    steps = [line for line in map(json.loads, metrics.read_text().splitlines()) if "mismatch_kl" in line]
    assert len(steps) == 3
    assert max(step["mismatch_kl"] for step in steps) < 1e-6


def test_auto_takes_it_on_a_gpu_alone() -> None:
    kinds = {device: choose_engine(EngineKind.auto, torch.device(device)) for device in ("cpu", "cuda")}
    assert kinds == {"cpu": EngineKind.local, "cuda": EngineKind.sglang}
    assert choose_engine(EngineKind.sglang, torch.device("cpu")) == EngineKind.sglang
