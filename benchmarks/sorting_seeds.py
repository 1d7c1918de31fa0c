"""Run the recipe sorting on several seeds, and its control, whose reward knows nothing: exactness, sampled and greedy.

python benchmarks/sorting_seeds.py [--seeds 0 1 2 3 4] [--control 0 1] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from common import read_metrics, run_recipe, save_result, table

CONTROL = "reward._target_=hybrid_rl.recipes.sorting.shuffled_truth"


def main() -> None:
    """Run what is not in the folder yet, print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--control", type=int, nargs="*", default=[0, 1], help="seeds of the control")
    parser.add_argument("--folder", type=Path, help="where runs are kept; finished ones are only read")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        jobs = {str(seed): [f"seed={seed}"] for seed in arguments.seeds}
        jobs |= {f"control{seed}": [f"seed={seed}", CONTROL] for seed in arguments.control}
        runs = {name: _run(folder / name, overrides) for name, overrides in jobs.items()}
    rows = [
        (name, *(_shown(run, at) for at in ("sft", 50, 100, 150, "rl")), *(run["seconds"][s] for s in ("sft", "rl")))
        for name, run in runs.items()
    ]
    print("reward (exact), greedy reward (exact)")
    print(table(rows, ("seed", "after SFT", "step 50", "step 100", "step 150", "after RL", "SFT s", "RL s")))
    save_result("sorting_seeds", {"runs": runs})


def _run(folder: Path, overrides: list[str]) -> dict[str, Any]:
    if not (folder / "summary.json").is_file():
        run_recipe(folder, *overrides, recipe="sorting")
    keys = ("name", "step", "reward", "correct", "measures", "greedy")
    evaluations = [{key: record[key] for key in keys} for record in read_metrics(folder, "eval")]
    return {"seconds": json.loads((folder / "summary.json").read_text())["seconds"], "evaluations": evaluations}


def _shown(run: dict[str, Any], at: str | int) -> str:
    """Return one evaluation's figures: of a stage by its name, or of an RL step by its number."""
    found = next(e for e in run["evaluations"] if at == (e["step"] if e["name"] == "step" else e["name"]))
    sampled, greedy = (f"{e['reward']:.3f} ({e['measures']['exact']:.3f})" for e in (found, found["greedy"]))
    return f"{sampled}, {greedy}"


if __name__ == "__main__":
    main()
