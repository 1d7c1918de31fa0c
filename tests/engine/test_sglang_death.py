"""SGLang that dies, hangs or does not start: the run goes on from where it was, or ends in one clear line; nothing is left behind."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed here; `make test-sglang` installs it for the CPU", allow_module_level=True)

from hybrid_rl.engine.base import EngineDied, EngineError, Sampling
from hybrid_rl.engine.sglang.engine import SGLangEngine
from hybrid_rl.policy.model import Policy
from tests.engine_contract import checkpoint, collect, requests, tokens


def start(folder: Path, timeout: float = 300.0, **more) -> SGLangEngine:
    ends = Policy.load(folder, torch.device("cpu")).end_ids()
    engine = SGLangEngine(folder, ends, 8, 64, timeout=timeout, **more)
    engine.set_version(0)
    return engine


def family_of(host: int) -> list[psutil.Process]:
    return [psutil.Process(host), *psutil.Process(host).children(recursive=True)]


def scheduler_of(host: int) -> psutil.Process:
    return next(p for p in family_of(host) if "scheduler" in p.name())


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def shared_files() -> set[Path]:
    return set(Path("/dev/shm").glob("sglang_loads_*"))


@pytest.mark.parametrize("blow", ["kill the scheduler", "stop the host", "stop the scheduler", "quit the scheduler"])
def test_a_new_engine_takes_the_place_of_one_that_died_or_hangs(tiny_folder: Path, folder_of, blow: str) -> None:
    """In the middle of sampling; afterwards it has the weights it is given, and not those of its folder, and the tokens of before."""
    engine, new = start(tiny_folder, timeout=8.0), checkpoint(folder_of("qwen3", seed=1))
    leaves = [Path(path) for path in engine._host._leaves]
    assert leaves
    assert all(path.exists() for path in leaves)
    sampling = Sampling(max_tokens=30)
    try:
        engine.update_weights([new], 1)
        expected = tokens(collect(engine, requests(), sampling))
        stream = engine.generate(requests(), sampling)
        got = {(c := next(stream)).id: c.token_ids}
        family = family_of(engine._host.pid)
        victim = family[0] if "host" in blow else scheduler_of(engine._host.pid)
        victim.send_signal({"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "quit": signal.SIGQUIT}[blow.split()[0]])
        since = time.perf_counter()
        with pytest.raises(EngineDied, match=r"progress for 8 s \(engine.timeout\)" if "stop" in blow else "has ended with code"):
            got.update((completion.id, completion.token_ids) for completion in stream)
        assert time.perf_counter() - since < 20
        assert not alive(family)
        with pytest.raises(EngineDied):
            engine.sleep()
        with pytest.raises(EngineDied):
            engine.generate(requests(), sampling)
        if blow not in ("kill the scheduler", "stop the host"):  # a start takes its time
            return
        engine.restart()
        with pytest.raises(EngineError, match="hand its weights over"):
            engine.generate(requests(), sampling)
        engine.restart()  # a living one stays as it is
        engine.update_weights([new], 1)
        rest = collect(engine, [r for r in requests() if r.id not in got], sampling)
        assert {**got, **tokens(rest)} == expected
        leaves += map(Path, engine._host._leaves)
    finally:
        engine.close()
        assert not any(path.exists() for path in leaves)


def test_long_completions_are_no_hang(tiny_folder: Path) -> None:
    """No answer for longer than the limit, but progress."""
    engine = start(tiny_folder, timeout=2.0, extra={"max_total_tokens": 8192})
    engine.capacity = 3000
    try:
        since = time.perf_counter()
        out = collect(engine, requests(groups=2, size=1), Sampling(temperature=0.0, max_tokens=2500))
        assert max(len(c.token_ids) for c in out.values()) > 1000
        assert time.perf_counter() - since > 2.0, "too fast to show anything"
    finally:
        engine.close()


def test_what_does_not_start_ends_in_one_line_and_the_logs_tail(tiny_folder: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for file in tiny_folder.iterdir():
        (wrong / file.name).write_bytes(file.read_bytes().replace(b"Qwen3ForCausalLM", b"Qwen9ForCausalLM"))
    for folder, more, message in (
        (wrong, {}, "Qwen9"),
        (tiny_folder, {"extra": {"attention_backend": "no_such_backend"}}, "no_such_backend"),
        (tiny_folder, {"extra": {"no_such_argument": 1}}, r"SGLang 0\.5\.\d+ has no argument no_such_argument \(engine\.arguments\)"),
        (tiny_folder, {"start_timeout": 0.5}, r"0\.5 s \(engine\.start_timeout\)"),
    ):
        with pytest.raises(EngineError, match=rf"(?s)SGLang did not start: .*{message}") as error:
            SGLangEngine(folder, frozenset([257]), 8, 64, **more)
        assert re.search(message, str(error.value).splitlines()[0]), "the first line says why"


def sampling_run(folder: Path, *overrides: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "hybrid_rl.run", "+recipe=reverse", "engine=sglang", f"output_dir={folder}"]
    small = [
        "sft.steps=2",
        "rl.steps=3",
        "rl.max_empty_steps=0",
        "eval.max_tasks=4",
        "rollout.batch_size=16",
        "rollout.group_size=4",
        "rollout.max_tokens=24",
    ]
    return subprocess.Popen([*command, *small, *overrides], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def host_of(run: int) -> int:
    return next(p.pid for p in psutil.Process(run).children(recursive=True) if "hybrid_rl.engine.sglang.host" in " ".join(p.cmdline()))


def lines_until(run: subprocess.Popen, what: str) -> list[str]:
    assert run.stdout is not None
    lines: list[str] = []
    for line in run.stdout:
        lines.append(line)
        if what in line:
            return lines
    raise AssertionError("".join(lines))


def test_a_run_whose_scheduler_is_killed_goes_on_and_says_so(tmp_path: Path) -> None:
    run = sampling_run(tmp_path, "engine.restarts=1")
    lines_until(run, "step 1/3")
    os.kill(scheduler_of(host_of(run.pid)).pid, signal.SIGKILL)
    output = run.communicate(timeout=240)[0]
    assert run.returncode == 0, output
    assert "engine restarted (1 of 1 times): SGLang's process has ended" in output
    assert output.count("× engine restarted") == 1
    assert "Traceback" not in output.partition("engine restarted")[0]


def test_the_end_of_restarts_is_one_clear_message(tmp_path: Path) -> None:
    run = sampling_run(tmp_path, "engine.restarts=0")
    lines_until(run, "step 1/3")
    os.kill(scheduler_of(host_of(run.pid)).pid, signal.SIGKILL)
    output = run.communicate(timeout=240)[0]
    assert run.returncode == 1, output
    assert "hybrid_rl: the engine died 1 times, and engine.restarts=0; SGLang's process has ended with code" in output


def test_a_trainer_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    before = shared_files()
    run = sampling_run(tmp_path)
    lines_until(run, "step 1/3")
    family = psutil.Process(run.pid).children(recursive=True)
    assert shared_files() - before
    run.kill()
    run.communicate()
    _, left = psutil.wait_procs(family, timeout=40)
    assert not alive(left)
    assert not shared_files() - before
