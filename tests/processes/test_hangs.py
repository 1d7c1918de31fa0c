"""Who hangs: the rule on its own, and whole runs in which one rank stops for ever. The launcher's side with real processes: test_launch."""

from __future__ import annotations

import re
import time
from pathlib import Path

import psutil
import pytest

from hybrid_rl.processes import hangs
from hybrid_rl.processes.hangs import START, Note, hanging, main_thread
from tests.test_run import run, run_folder

pytestmark = pytest.mark.slow  # each starts several ranks, or whole runs


def note(rank: int, at: float, waits: bool = False, phase: str = "update") -> Note:
    return Note(rank, phase, at, waits)


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        ([note(0, 95), note(1, 96)], []),
        ([note(0, 50, waits=True), note(1, 95)], []),  # the one waited for gets on, however long it takes
        ([note(0, 95, waits=True), note(1, 89)], [1]),  # the one that waits did something later
        ([note(0, 50, waits=True), note(1, 89)], [1]),
        ([note(0, 80), note(1, 81)], [0, 1]),
        ([note(0, 80, waits=True), note(1, 81, waits=True)], [0, 1]),  # each for the other
        ([note(0, 80, waits=True), note(1, 95, waits=True)], []),
        ([note(0, 50, phase=START), note(1, 50, phase=START)], []),  # loading
        ([note(0, 50, phase=START), note(1, 91, waits=True, phase=START)], []),
        ([note(0, 50, phase=START), note(1, 89, waits=True, phase=START)], [0]),
    ],
)
def test_the_rule(notes: list[Note], expected: list[int]):
    assert [n.rank for n in hanging(notes, now=100.0, timeout=10.0)] == expected


def test_phases_nest_and_progress_is_noted(monkeypatch):
    own = hangs._Notes(None)
    monkeypatch.setattr(hangs, "_own", own)
    assert own.read().phase == START
    with hangs.phase("reward check", loading=True):
        assert own.read().phase == "reward check"
    assert own.read().phase == START
    with hangs.phase("evaluate"):
        with hangs.phase("eval"), hangs.waiting():
            inner = own.read()
            assert (inner.phase, inner.waits) == ("eval", True)
        assert (own.read().phase, own.read().waits) == ("evaluate", False)
        before = own.read().at
        time.sleep(0.01)
        hangs.progress()
        assert own.read().at > before
    assert own.read().phase == "after evaluate", "START is for loading, which may take any time"


def test_a_note_costs_microseconds(monkeypatch):
    monkeypatch.setattr(hangs, "_own", hangs._Notes(None))
    start = time.perf_counter()
    for _ in range(10_000):
        hangs.progress()
    assert time.perf_counter() - start < 0.5  # 50 µs each, on the busiest machine


def test_the_main_threads_frames_come_last():
    text = """Thread 0x00007f0001 (most recent call first):
  File "/a/pool.py", line 3 in wait

Current thread 0x00007f0002 (most recent call first):
  File "/a/loss.py", line 12 in inner
  File "/a/run.py", line 1 in <module>
"""
    assert main_thread(text) == ['File "/a/loss.py", line 12 in inner', 'File "/a/run.py", line 1 in <module>']
    assert main_thread("") == []


def wait_until_gone(folder: Path, seconds: float) -> None:
    """No process works in the folder any more."""
    until = time.monotonic() + seconds
    while (left := [p for p in psutil.process_iter() if works_in(p, folder)]) and time.monotonic() < until:
        time.sleep(0.2)
    assert not left, left


def works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


SIGNAL = "reward._target_=tests.rewards.hash_of_answer"  # or there is nothing to update
SLEEPS = "algo.loss._target_=tests.hangs.loss"
# overrides, phase, frame, rank; the check of the algorithm calls a loss four times, on rank 0
WHERE = {
    "update": ([SLEEPS, "+algo.loss.rank=1", SIGNAL], "update", "in sleeps_in_the_loss", 1),
    "reward": (
        ["reward._target_=tests.rewards.hangs_on_rank_1", "rollout.reward_timeout=1000"],
        "reward check",
        "in check",
        1,
    ),
    "algorithm": ([SLEEPS, "+algo.loss.rank=0", SIGNAL, "ranks=1"], "algorithm check", "in sleeps_in_the_loss", 0),
    "alone": (
        [SLEEPS, "+algo.loss.rank=0", "+algo.loss.after=6", SIGNAL, "ranks=1"],
        "update",
        "in sleeps_in_the_loss",
        0,
    ),
}


@pytest.mark.parametrize(
    "where", ["update", *(pytest.param(name, marks=pytest.mark.slow) for name in ("reward", "algorithm", "alone"))]
)
def test_a_run_in_which_a_rank_sleeps_for_ever(tmp_path: Path, where: str):
    """In the update the other one is inside a collective of FSDP's own, which says nothing of waiting: the stack does."""
    overrides, phase, frame, rank = WHERE[where]
    output = run(tmp_path, "ranks=2", "rank_timeout=6", "sft.steps=0", "rl.steps=3", *overrides, code=1)
    said = output[output.index("hybrid_rl: rank") :].splitlines()
    assert re.match(rf"hybrid_rl: rank {rank} hangs in phase {phase}: no progress since .*, rank_timeout=6", said[0])
    assert sum(line.startswith("hybrid_rl: ") for line in said) == 1
    own = said.index(f"  rank {rank}, phase {phase}, hangs:")
    assert any(frame in line for line in said[own + 1 : own + 9])
    assert "Traceback" not in output
    assert frame in (run_folder(tmp_path) / "stacks" / f"rank_{rank}.txt").read_text()
    wait_until_gone(tmp_path, 8)
