"""SGLang that dies, hangs or does not start: the run goes on from where it was, or ends in one clear line; nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hybrid_rl.engine.base import EngineDied, EngineError, Sampling
from hybrid_rl.engine.sglang.engine import SGLangEngine
from hybrid_rl.engine.sglang.options import SGLangOptions
from tests.engine.sglang.conftest import start
from tests.engine_contract import checkpoint, collect, requests, tokens


def family_of(host: int) -> list[psutil.Process]:
    return [psutil.Process(host), *psutil.Process(host).children(recursive=True)]


def scheduler_of(host: int) -> psutil.Process:
    return next(p for p in family_of(host) if "scheduler" in p.name())


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def shared_files(processes: list[psutil.Process]) -> set[Path]:
    """SGLang's files in shared memory that these processes use; they have names no more."""
    mapped = {Path(m.path.removesuffix(" (deleted)")) for p in processes for m in p.memory_maps()}
    return {path for path in mapped if path.name.startswith(("sglang_loads_", "sgl_shm_"))}


@pytest.fixture(scope="module")
def mortal(tiny_folder: Path) -> Iterator[SGLangEngine]:
    """An engine that one test after the other ends, and starts again."""
    engine = start(tiny_folder, timeout=8.0)
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        yield engine
        family = family_of(engine._host.pid) if not engine._host.dead else []
        for _ in range(2):
            engine.close()
        assert not alive(family)
        assert bystander.poll() is None
        with pytest.raises(EngineError, match="closed"):
            engine.generate(requests(), Sampling())
    finally:
        engine.close()
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize("blow", ["kill the scheduler", "stop the host", "stop the scheduler", "quit the scheduler"])
def test_a_new_engine_takes_the_place_of_one_that_died_or_hangs(mortal: SGLangEngine, folder_of, blow: str) -> None:
    """In the middle of sampling; afterwards it has the weights it is given, and not those of its folder, and the tokens of before."""
    engine, new, sampling = mortal, checkpoint(folder_of("qwen3", seed=1)), Sampling(max_tokens=30)
    engine.restart()  # if the test before ended it; a living one stays as it is
    engine.update_weights([new], 1)
    expected = tokens(collect(engine, requests(), sampling))
    stream = engine.generate(requests(), sampling)
    got = {(c := next(stream)).id: c.token_ids}
    family = family_of(engine._host.pid)
    victim = family[0] if "host" in blow else scheduler_of(engine._host.pid)
    victim.send_signal({"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "quit": signal.SIGQUIT}[blow.split()[0]])
    since = time.perf_counter()
    with pytest.raises(
        EngineDied, match=r"progress for 8 s \(engine.timeout\)" if "stop" in blow else "has ended with code"
    ) as error:
        got.update((completion.id, completion.token_ids) for completion in stream)
    assert "\n" not in str(error.value)
    assert time.perf_counter() - since < 20
    assert not alive(family)
    for call in (engine.sleep, lambda: engine.generate(requests(), sampling), lambda: engine.set_version(3)):
        with pytest.raises(EngineDied):
            call()
    if blow != "kill the scheduler":  # a start takes its time
        return
    engine.restart()
    with pytest.raises(EngineError, match="hand its weights over"):
        engine.generate(requests(), sampling)
    engine.restart()
    engine.update_weights([new], 1)
    rest = collect(engine, [r for r in requests() if r.id not in got], sampling)
    assert {**got, **tokens(rest)} == expected


def test_an_engine_after_a_restart_does_not_repeat_the_draws_of_the_one_before(tiny_folder: Path) -> None:
    """Without deterministic sampling, where a request's seed has no part; the host is killed while nothing runs."""
    engine, sampling = start(tiny_folder, deterministic=False), Sampling(max_tokens=12)
    try:
        first = collect(engine, requests(groups=1, size=1), sampling)[0].token_ids
        os.kill(engine._host.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="has ended"):
            engine.update_weights([checkpoint(tiny_folder)], 1)
        engine.restart()
        engine.update_weights([checkpoint(tiny_folder)], 1)
        assert collect(engine, requests(groups=1, size=1), sampling)[0].token_ids != first
    finally:
        engine.close()


def test_long_completions_are_no_hang(make_engine, tiny_folder: Path) -> None:
    """No answer for longer than the limit, but progress."""
    engine = make_engine(tiny_folder, capacity=3000)
    patience, engine._host.timeout = engine._host.timeout, 4.0
    try:
        since = time.perf_counter()
        out = collect(engine, requests(groups=2, size=1), Sampling(temperature=0.0, max_tokens=2500))
        assert max(len(c.token_ids) for c in out.values()) > 1000
        assert time.perf_counter() - since > 4.0, "too fast to show anything"
    finally:
        engine._host.timeout = patience


def test_what_does_not_start_ends_in_one_line_that_names_its_log(tiny_folder: Path, tmp_path: Path) -> None:
    wrong, log = tmp_path / "wrong", tmp_path / "engine.log"
    wrong.mkdir()
    for file in tiny_folder.iterdir():
        (wrong / file.name).write_bytes(file.read_bytes().replace(b"Qwen3ForCausalLM", b"Qwen9ForCausalLM"))
    for folder, limit, message in (
        (wrong, 300.0, "Qwen9.*; its output is in .*engine.log"),
        (tiny_folder, 0.5, r"0\.5 s \(engine\.start_timeout\)"),
    ):
        with pytest.raises(EngineError) as error:
            SGLangEngine(folder, frozenset([257]), 8, 64, SGLangOptions(log=log, start_timeout=limit))
        assert re.fullmatch(f"SGLang .* did not start .*: .*{message}.*", str(error.value)), str(error.value)
    assert "Qwen9" in log.read_text()


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
    return next(
        p.pid
        for p in psutil.Process(run).children(recursive=True)
        if "hybrid_rl.engine.sglang.host" in " ".join(p.cmdline())
    )


def lines_until(run: subprocess.Popen, what: str) -> list[str]:
    assert run.stdout is not None
    lines: list[str] = []
    for line in run.stdout:
        lines.append(line)
        if what in line:
            return lines
    raise AssertionError("".join(lines))


def test_a_recipe_trains_on_after_its_scheduler_was_killed(tmp_path: Path) -> None:
    """Every handover is verified, and what the engines sampled has the trainer's probabilities."""
    # a reward that differs within each group, so that every step has an update
    hashed = "reward._target_=tests.rewards.hash_of_answer"
    run = sampling_run(tmp_path, "engine.restarts=1", "handover.verify=true", hashed)
    before = lines_until(run, "step 1/3")
    host = host_of(run.pid)
    assert "engine sglang" in "".join(before)
    os.kill(scheduler_of(host).pid, signal.SIGKILL)
    output = run.communicate(timeout=240)[0]
    assert run.returncode == 0, output
    assert re.search(
        r"engine restarted \(1 of 1 times\): SGLang's process has ended.*; its output is in .*engine_0.log\n", output
    )
    assert output.count("× engine restarted") == 1
    assert "Traceback" not in output
    (metrics,) = tmp_path.glob("reverse/*/metrics.jsonl")
    steps = [line for line in map(json.loads, metrics.read_text().splitlines()) if "mismatch_kl" in line]
    assert len(steps) == 3
    assert max(step["mismatch_kl"] for step in steps) < 1e-6


def test_a_trainer_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    run = sampling_run(tmp_path)
    lines_until(run, "step 1/3")
    family = psutil.Process(run.pid).children(recursive=True)
    files = shared_files(family)
    assert files
    assert not any(file.exists() for file in files)  # so that none stays, whoever is killed first
    run.kill()
    run.communicate()
    _, left = psutil.wait_procs(family, timeout=40)
    assert not alive(left)
