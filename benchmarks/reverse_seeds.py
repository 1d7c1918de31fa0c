"""Run the worked example on several seeds: evaluations of the base model, after SFT and after RL, and seconds.

python benchmarks/reverse_seeds.py [--seeds 0 1 2 3 4]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from common import run_recipe, save_result, table


def main() -> None:
    """Run the recipe with each seed, print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("overrides", nargs="*", help="settings for every run, like rl.steps=30")
    arguments = parser.parse_args()
    rows, runs = [], []
    with tempfile.TemporaryDirectory() as temporary:
        for seed in arguments.seeds:
            folder = run_recipe(Path(temporary) / str(seed), f"seed={seed}", *arguments.overrides)
            summary = json.loads((folder / "summary.json").read_text())
            seconds = summary["seconds"]
            rewards = [summary[f"eval/{name}"] for name in ("base", "sft", "rl")]
            rows.append((seed, *rewards, *(seconds[name] for name in ("sft", "rl", "total"))))
            runs.append(summary)
    columns = list(zip(*rows, strict=True))[1:]
    spread = [statistics.stdev(c) if len(c) > 1 else 0.0 for c in columns]
    rows += [("mean", *map(statistics.fmean, columns)), ("spread (s.d.)", *spread)]
    print(table(rows, ("seed", "base", "after SFT", "after RL", "SFT s", "RL s", "total s")))
    save_result("reverse_seeds", {"seeds": arguments.seeds, "overrides": arguments.overrides, "runs": runs})
    rl = columns[2]
    print(
        f"reverse_seeds: rl_mean={statistics.fmean(rl):.3f} rl_min={min(rl):.3f} "
        f"sft_mean={statistics.fmean(columns[1]):.3f} total_s={statistics.fmean(columns[-1]):.1f}"
    )


if __name__ == "__main__":
    main()
