"""The long tail of the benchmark of groups that take several steps."""

from __future__ import annotations

import statistics

import pytest
from hybrid_rl.recipes import sorting

from benchmarks import partial


def test_one_demonstration_in_twenty_has_a_tail_and_no_task_differs() -> None:
    arguments = {"system_prompt": "Rewrite.", "min_letters": 3, "max_letters": 4}
    ours, theirs = partial.load_tasks(**arguments), sorting.load_tasks(**arguments)
    assert (ours.rl, ours.eval) == (theirs.rl, theirs.eval)
    tails = [len(a.demonstration) - len(b.demonstration) for a, b in zip(ours.sft, theirs.sft, strict=True)]
    assert all(a.demonstration.rstrip("~") == b.demonstration for a, b in zip(ours.sft, theirs.sft, strict=True))
    long = [tail for tail in tails if tail]
    assert len(long) / len(tails) == pytest.approx(partial.SHARE, rel=0.3)
    assert max(long) == partial.MOST
    # an exponential distribution's mean, cut at MOST = 2 · MEAN: MEAN · (1 − e^−2)
    assert statistics.fmean(long) == pytest.approx(partial.MEAN * 0.865, rel=0.15)
    assert partial.load_tasks(**arguments) == ours
    task = ours.eval[0]
    right = f"<answer>{task.answer}</answer>"
    assert partial.in_place(f"{right}~~~~", task) == partial.in_place(right, task) == (1.0, {"exact": 1.0})
    assert partial.in_place(f"{right}~x", task)[0] == 0
