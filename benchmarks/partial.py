"""Measure what rollout.oversample gains if a few completions are much longer than the others.

    python -m benchmarks.partial [--seeds 0 1 2] [--oversample 2] [--folder FOLDER] [key=value …]

The task is that of the sorting recipe, with 3 or 4 letters: RL teaches what no demonstration shows. After the answer,
which alone is paid, one demonstration in 20 goes on with a row of tildes, 400 on average, so the policy's completions
have a long tail that no reward touches. SFT is done once a seed, and RL runs from its weights with and without
oversampling. As nothing is paid for the tail, it grows or vanishes by chance while RL learns, so seconds are measured
in runs of their own, whose learning rate is 1e-9: all phases of a step, the mean over the steps but the first ten, in
which the groups under way are not yet those of a long run.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from hybrid_rl.recipes import sorting

from hybrid_rl.data import TaskSets
from hybrid_rl.types import Task

FIRST = 10  # steps that are not counted
TAIL, SHARE, MEAN, MOST = "~", 0.05, 400, 800  # of the demonstrations, and of the tildes of those that have some
SETTINGS = [
    "data._target_=benchmarks.partial.load_tasks", "reward._target_=benchmarks.partial.in_place", "data.min_letters=3",
    "data.max_letters=4", "rollout.max_tokens=900", "rollout.batch_size=64", "rollout.group_size=8", "threads=1",
    "rollout.max_staleness=16",
    "model.tiny.hidden_size=64", "model.tiny.intermediate_size=192", "model.tiny.heads=2", "model.tiny.kv_heads=1",
    "eval.samples=2", "eval.greedy=false", "rl.eval_every=0", "rl.checkpoint_every=1000",
]  # fmt: skip
SFT = ["sft.steps=700", "rl.steps=0"]
RL = ["sft.steps=0", "rl.steps=80"]
TIMED = ["sft.steps=0", "rl.steps=50", "rl.optimizer.lr=1e-9", "eval.max_tasks=1"]


def load_tasks(**arguments: Any) -> TaskSets:
    """Return the tasks of the sorting recipe; a few demonstrations have a tail of a random length."""
    sets = sorting.load_tasks(**arguments)
    return replace(sets, sft=[_tailed(task) for task in sets.sft])


def _tailed(task: Task) -> Task:
    numbers = random.Random(task.id)
    if numbers.random() >= SHARE:
        return task
    count = min(MOST, 1 + int(numbers.expovariate(1 / MEAN)))
    return replace(task, demonstration=f"{task.demonstration}{TAIL * count}")


def in_place(completion: str, task: Task) -> tuple[float, dict[str, float]]:
    """Pay what the recipe pays for the completion without its tail."""
    return sorting.in_place(completion.rstrip(TAIL), task)


def main() -> None:
    """Run both sides on each seed, print the table and write the results."""
    from benchmarks import common

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--oversample", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, help="where runs are kept; finished ones are only read")
    arguments, overrides = parser.parse_known_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        kept = arguments.folder or Path(temporary)
        for seed in arguments.seeds:
            own = [*SETTINGS, f"seed={seed}"]
            start = _run(kept / f"sft_{seed}", [*own, *SFT, *overrides])
            for oversample in (1.0, arguments.oversample):
                more = [f"model.path={(start / 'final').absolute()}", f"rollout.oversample={oversample}", *overrides]
                learnt = _run(kept / f"rl_{seed}_{oversample:g}", [*own, *RL, *more])
                timed = _run(kept / f"timed_{seed}_{oversample:g}", [*own, *TIMED, *more])
                rows.append({"seed": seed, "oversample": oversample, **_seconds(timed), **_scores(learnt)})
                print(rows[-1], flush=True)
    columns = (
        "seed", "oversample", "step_s", "rollout_s", "update_s", "length", "lag", "discarded", "before", "after",
    )  # fmt: skip
    print(common.table([tuple(row[name] for name in columns) for row in rows], columns))
    sides = [[row for row in rows if row["oversample"] == o] for o in (1.0, arguments.oversample)]
    gain = fmean(a["step_s"] / b["step_s"] for a, b in zip(*sides, strict=True))
    after = [[row["after"] for row in side] for side in sides]
    spread = [f"{fmean(side):.3f} ± {stdev(side) if len(side) > 1 else 0:.3f}" for side in after]
    print(f"a step takes {gain:.2f} times as long without; evaluation {spread[0]} without, {spread[1]} with")
    common.save_result("partial", {"overrides": overrides, "rows": rows, "gain": gain})


def _run(folder: Path, overrides: list[str]) -> Path:
    from benchmarks.common import run_recipe

    return folder if (folder / "summary.json").is_file() else run_recipe(folder, *overrides, recipe="sorting")


def _seconds(folder: Path) -> dict[str, float]:
    from benchmarks.common import read_metrics

    steps = read_metrics(folder, "rl")
    counted = steps[FIRST:]
    return {
        "step_s": fmean(sum(m["seconds"].values()) for m in counted),
        "rollout_s": fmean(m["seconds"]["rollout"] for m in counted),
        "update_s": fmean(m["seconds"]["update"] for m in counted),
        "length": fmean(m["length"] for m in counted),
        "lag": fmean(m.get("lag_mean", 0.0) for m in counted),
        "discarded": sum(m.get("discarded_rollouts", 0) for m in counted) / sum(m["rollouts"] for m in counted),
    }


def _scores(folder: Path) -> dict[str, float]:
    from benchmarks.common import read_metrics

    evals, steps = {e["name"]: e["reward"] for e in read_metrics(folder, "eval")}, read_metrics(folder, "rl")
    lag = fmean(m.get("lag_mean", 0.0) for m in steps)
    return {"before": evals["base"], "after": evals["rl"], "learning_lag": lag, "learning_length": steps[-1]["length"]}


if __name__ == "__main__":
    main()
