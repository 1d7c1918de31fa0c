"""deterministic=true: two processes, the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_run import run, same

pytestmark = pytest.mark.slow  # each starts several ranks, or whole runs

FEW = ["sft.steps=6", "rl.steps=3", "rl.eval_every=0", "deterministic=true", "reward._target_=tests.rewards.by_hash"]


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_processes_give_the_same_bits(tmp_path: Path, threads: int):
    """The reward is Python's hash of a text, which differs from process to process unless that is seen to."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        run(folder, *FEW, f"threads={threads}", fresh=True)  # with its own seed of the hash
    same(*folders)
