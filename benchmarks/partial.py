"""Measure what rollout.oversample gains if a few completions are much longer than the others.

    python -m benchmarks.partial [--seeds 0 1 2] [--oversample 1.5] [--folder FOLDER] [key=value …]

The task is that of the reverse recipe. After the answer, which alone is paid, one demonstration in 20 goes on with a
row of tildes, 400 on average, so the policy's completions have a long tail that no reward touches. SFT is done once a
seed; from its weights RL runs twice, with and without oversampling, one after the other. Seconds are those of all
phases of a step, the median over the steps but the first three, in which the groups under way are not yet complete.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from hybrid_rl.recipes import reverse

from hybrid_rl.data import TaskSets
from hybrid_rl.types import Task

FIRST = 3  # steps that are not counted
TAIL, SHARE, MEAN, MOST = "~", 0.05, 400, 800  # of the demonstrations, and of the tildes of those that have some
SETTINGS = [
    "data._target_=benchmarks.partial.load_tasks", "rollout.max_tokens=900", "rollout.batch_size=32",
    "rollout.group_size=4", "model.tiny.hidden_size=64", "model.tiny.intermediate_size=192", "model.tiny.heads=2",
    "model.tiny.kv_heads=1", "threads=1", "eval.samples=2", "rl.checkpoint_every=1000",
]  # fmt: skip
SFT = ["sft.steps=1000", "sft.label_smoothing=0", "sft.curriculum=0", "rl.steps=0"]
RL = ["sft.steps=0", "rl.steps=100"]


def load_tasks(**arguments: Any) -> TaskSets:
    """Return the tasks of the reverse recipe; a few demonstrations have a tail of a random length."""
    sets = reverse.load_tasks(**arguments)
    return replace(sets, sft=[_tailed(task) for task in sets.sft])


def _tailed(task: Task) -> Task:
    numbers = random.Random(task.id)
    if numbers.random() >= SHARE:
        return task
    count = min(MOST, 1 + int(numbers.expovariate(1 / MEAN)))
    return replace(task, demonstration=f"{task.demonstration}{TAIL * count}")


def main() -> None:
    """Run both sides on each seed, print the table and write the results."""
    from benchmarks import common

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--oversample", type=float, default=1.5)
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
                run = _run(kept / f"rl_{seed}_{oversample:g}", [*own, *RL, *more])
                rows.append({"seed": seed, "oversample": oversample, **_figures(run)})
                print(rows[-1], flush=True)
    columns = ("seed", "oversample", "step_s", "rollout_s", "length", "length_max", "lag", "before", "after")
    print(common.table([tuple(row[name] for name in columns) for row in rows], columns))
    sides = [[row for row in rows if row["oversample"] == o] for o in (1.0, arguments.oversample)]
    gain = fmean(a["step_s"] / b["step_s"] for a, b in zip(*sides, strict=True))
    after = [[row["after"] for row in side] for side in sides]
    spread = [f"{fmean(side):.3f} ± {stdev(side) if len(side) > 1 else 0:.3f}" for side in after]
    print(f"a step takes {gain:.2f} times as long without; evaluation {spread[0]} without, {spread[1]} with")
    common.save_result("partial", {"overrides": overrides, "rows": rows, "gain": gain})


def _run(folder: Path, overrides: list[str]) -> Path:
    from benchmarks.common import run_recipe

    return folder if (folder / "summary.json").is_file() else run_recipe(folder, *overrides)


def _figures(folder: Path) -> dict[str, float]:
    from benchmarks.common import read_metrics

    steps, evals = read_metrics(folder, "rl"), {e["name"]: e for e in read_metrics(folder, "eval")}
    counted = steps[FIRST:]
    return {
        "step_s": median(sum(m["seconds"].values()) for m in counted),
        "mean_step_s": fmean(sum(m["seconds"].values()) for m in counted),
        "rollout_s": median(m["seconds"]["rollout"] for m in counted),
        "update_s": median(m["seconds"]["update"] for m in counted),
        "length": fmean(m["length"] for m in counted),
        "length_max": max(m["length_max"] for m in counted),
        "lag": fmean(m.get("lag_mean", 0.0) for m in counted),
        "lag_max": max(max(map(int, m.get("lag", {"0": 1}))) for m in counted),
        "discarded": sum(m.get("discarded_rollouts", 0) for m in steps),
        "reward_first": steps[0]["reward"],
        "before": evals["base"]["reward"],
        "after": evals["rl"]["reward"],
        "total_s": json.loads((folder / "summary.json").read_text())["seconds"]["rl"],
    }


if __name__ == "__main__":
    main()
