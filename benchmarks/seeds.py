"""Run a recipe on several seeds: every evaluation, sampled and greedy, and seconds; also a control that must not learn.

python benchmarks/seeds.py RECIPE [--seeds 0 1 2] [--control 0 1] [--folder FOLDER] [key=value …]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import read_metrics, run_recipe, save_result, table

# what makes a recipe its own control: a reward that knows nothing of the task
CONTROLS = {"sorting": "reward._target_=hybrid_rl.recipes.sorting.shuffled_truth"}


def main() -> None:
    """Run what is not in the folder yet, print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--control", type=int, nargs="*", default=[], help="seeds of the control")
    parser.add_argument("--folder", type=Path, help="where runs are kept; finished ones are only read")
    overrides = [given for given in sys.argv[1:] if "=" in given and not given.startswith("-")]
    arguments = parser.parse_args([given for given in sys.argv[1:] if given not in overrides])
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        jobs = {str(seed): [f"seed={seed}"] for seed in arguments.seeds}
        jobs |= {f"control{seed}": [f"seed={seed}", CONTROLS[arguments.recipe]] for seed in arguments.control}
        runs = {name: _run(arguments.recipe, folder / name, [*job, *overrides]) for name, job in jobs.items()}
    print("reward (measures), greedy reward (measures)")
    print(table(*_rows(runs)))
    save_result(f"{arguments.recipe}_seeds", {"overrides": overrides, "runs": runs})


def _run(recipe: str, folder: Path, overrides: list[str]) -> dict[str, Any]:
    if not (folder / "summary.json").is_file():
        run_recipe(folder, *overrides, recipe=recipe)
    keys = ("name", "step", "reward", "correct", "measures", "length", "truncated", "greedy")
    evaluations = [{key: record.get(key) for key in keys} for record in read_metrics(folder, "eval")]
    return {"seconds": json.loads((folder / "summary.json").read_text())["seconds"], "evaluations": evaluations}


def _rows(runs: dict[str, dict[str, Any]]) -> tuple[list[tuple[Any, ...]], tuple[str, ...]]:
    """Return a row for each run and the mean of the seeds ± their standard deviation, and the header."""
    places = [_place(e) for e in next(iter(runs.values()))["evaluations"]]
    timed = [stage for stage in ("sft", "rl", "total") if stage in next(iter(runs.values()))["seconds"]]
    rows = [
        (name, *map(_shown, run["evaluations"]), *(f"{run['seconds'][stage]:.0f}" for stage in timed))
        for name, run in runs.items()
    ]
    rewards = [[e["reward"] for e in run["evaluations"]] for name, run in runs.items() if name.isdigit()]
    if len(rewards) > 1:
        means = [f"{statistics.fmean(r):.3f} ± {statistics.stdev(r):.3f}" for r in zip(*rewards, strict=True)]
        rows.append(("mean", *means, *[""] * len(timed)))
    return rows, ("seed", *places, *(f"{stage} s" for stage in timed))


def _place(evaluation: dict[str, Any]) -> str:
    return f"step {evaluation['step']}" if evaluation["name"] == "step" else evaluation["name"]


def _shown(evaluation: dict[str, Any]) -> str:
    """Return one evaluation's figures: reward (measures), sampled and then greedy."""
    found = []
    for scores in filter(None, (evaluation, evaluation["greedy"])):
        measures = ", ".join(f"{value:.3f}" for value in (scores.get("measures") or {}).values())
        found.append(f"{scores['reward']:.3f}{f' ({measures})' if measures else ''}")
    return ", ".join(found)


if __name__ == "__main__":
    main()
