"""Compare every algorithm of conf/algo, and some compositions, on the worked example: RL after the same SFT.

    python benchmarks/algorithms.py [--seeds 0 1 2] [--only NAME ...]

Results are written after every run, and runs that exist with the same settings are not repeated, so that an interrupted
benchmark can be started again. An evaluation is the mean of SAMPLES answers to each of 128 held-out sentences.
`algo=opd` needs a teacher and is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from common import RESULTS, ROOT, read_metrics, save_result, table

SAMPLES = 4
LIMIT = 900.0  # seconds that one run may take
COMMON = ("threads=1", "ranks=1", "device=cpu", f"eval.samples={SAMPLES}", "rl.checkpoint_every=1000")
SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the comparison: settings, run on each seed."""

    name: str
    overrides: tuple[str, ...]
    group: str
    seeds: tuple[int, ...] | None = None  # only these; None: all


def recipe(name: str) -> Row:
    """Return the row of an algorithm with its own settings."""
    return Row(name, (f"algo={name}",), "recipe")


# one AdamW step per batch needs a higher learning rate: recipes/reverse/README.md has the trials
ONE_STEP = ("algo.minibatches=1", "rl.optimizer.lr=1e-3", "rl.optimizer.betas=[0.8,0.95]")
ROWS = [
    *map(
        recipe, ("grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "remax", "max_rl", "gspo", "cispo", "dppo", "ppo")
    ),
    Row("rloo, reinforce", ("algo=rloo", "algo/loss=reinforce"), "composition"),
    Row("remax, reinforce", ("algo=remax", "algo/loss=reinforce"), "composition"),
    Row("ppo, critic at 1e-5", ("algo=ppo", "algo.critic.optimizer.lr=1e-5"), "composition"),
    Row("sapo loss", ("algo/loss=sapo", "algo/aggregation=seq_mean"), "composition"),
    Row("opo advantage", ("algo/advantage=opo",), "composition"),
    Row("pass_at_k advantage", ("algo/advantage=pass_at_k",), "composition"),
    Row("r − μ, one step", ("algo/advantage=mean_only", "algo.minibatches=1"), "composition"),
    Row(
        "decoupled, 2 epochs", ("algo.old_logprobs=recomputed", "algo/correction=[tis]", "algo.epochs=2"), "composition"
    ),
    Row("KL in the loss", ("algo.reference=frozen", "algo.kl.coef=0.01"), "composition"),
    # tuned settings, the best of at most three tries on seed 0; the other tries follow, on that seed only
    Row("gspo", ("algo=gspo", "algo.loss.clip_low=0.02", "algo.loss.clip_high=0.02"), "tuned"),
    Row("r − μ, one step", ("algo/advantage=mean_only", *ONE_STEP), "tuned"),
    Row("dr_grpo", ("algo=dr_grpo", "algo.minibatches=1"), "try", (0,)),
    Row("dr_grpo", ("algo=dr_grpo", *ONE_STEP), "try", (0,)),
    Row("gspo", ("algo=gspo", "algo.loss.clip_low=3e-3", "algo.loss.clip_high=4e-3"), "try", (0,)),
    Row("rloo", ("algo=rloo", "algo/loss=reinforce", *ONE_STEP), "try", (0,)),
    Row("remax", ("algo=remax", "algo/loss=reinforce", "algo.minibatches=1"), "try", (0,)),
    Row("remax", ("algo=remax", "algo/loss=reinforce", *ONE_STEP), "try", (0,)),
    Row("ppo", ("algo=ppo", "algo.advantage.lam=1"), "try", (0,)),
    Row(
        "grpo", ("algo=grpo", "algo.epochs=2"), "try", (0,)
    ),  # the part of "decoupled, 2 epochs" that is due to the epochs
]


def run(folder: Path, overrides: Sequence[str]) -> float:
    """Run the recipe in a child process and return its CPU seconds. A failure ends the benchmark with its output."""
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted benchmark
    command = [sys.executable, "-m", "hybrid_rl.run", "+recipe=reverse", f"hydra.run.dir={folder}", *COMMON, *overrides]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, cwd=ROOT, timeout=LIMIT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-3000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def sft(folder: Path, seed: int) -> Path:
    """Return the checkpoint after SFT from which every algorithm starts with this seed."""
    if not (folder / "summary.json").exists():
        print(f"SFT of seed {seed}", flush=True)
        run(folder, ("rl.steps=0", f"seed={seed}"))
    return folder / "final"


def train(folder: Path, model: Path, row: Row, seed: int) -> dict[str, Any]:
    """Run RL with the settings of a row from `model`; return the measurements."""
    load = os.getloadavg()[0]
    cpu_seconds = run(folder, (f"model.path={model}", "sft.steps=0", f"seed={seed}", *row.overrides))
    summary, steps = json.loads((folder / "summary.json").read_text()), read_metrics(folder, "rl")
    columns = ("reward", "entropy", "clip_fraction", "length")
    return {
        "seed": seed,
        "before": summary["eval/base"],  # of the SFT checkpoint
        "after": summary["eval/rl"],
        "rl_seconds": summary["seconds"]["rl"],
        "cpu_seconds": cpu_seconds,
        "load_before": load,
        **{name: [round(step[name], 4) for step in steps] for name in columns},
    }


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return mean ± standard deviation as text."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"


def summarised(results: Iterable[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return one row of the table for each result; the columns are those of HEADER."""
    rows = []
    for result in results:
        runs = result["runs"]
        row = (
            result["name"],
            " ".join(f"`{o}`" for o in result["overrides"]),
            len(runs),
            spread([r["before"] for r in runs]),
            spread([r["after"] for r in runs]),
            f"{min(r['after'] for r in runs):.3f}",
            f"{statistics.fmean(r['reward'][-1] for r in runs):.3f}",
            f"{statistics.fmean(r['entropy'][-1] for r in runs):.2f}",
            f"{statistics.fmean(statistics.fmean(r['clip_fraction']) for r in runs):.1%}",
            f"{statistics.fmean(r['rl_seconds'] for r in runs):.0f}",
            f"{statistics.fmean(r['cpu_seconds'] for r in runs):.0f}",
        )
        rows.append(row)
    return rows


HEADER = (
    "name",
    "settings",
    "seeds",
    "after SFT",
    "after RL",
    "lowest",
    "last step",
    "entropy",
    "clipped",
    "RL s",
    "CPU s",
)


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the reward of each RL step, mean over seeds: a panel per row, with GRPO's in grey, tuned ones dashed."""
    chosen = [r for r in results if r["group"] != "try"]
    names = list(dict.fromkeys(r["name"] for r in chosen))
    curve = {
        id(r): [statistics.fmean(step) for step in zip(*(run["reward"] for run in r["runs"]), strict=True)]
        for r in chosen
    }
    base = next((curve[id(r)] for r in chosen if r["name"] == "grpo"), [])
    columns = 4
    figure, axes = plt.subplots(
        -(-len(names) // columns), columns, figsize=(10, 9), sharex=True, sharey=True, squeeze=False
    )
    for axis, name in zip(axes.flat, names, strict=False):
        axis.plot(range(1, len(base) + 1), base, color="0.7", linewidth=1)
        for r in (r for r in chosen if r["name"] == name):
            style = ("--", "tab:orange") if r["group"] == "tuned" else ("-", "tab:blue")
            axis.plot(range(1, len(curve[id(r)]) + 1), curve[id(r)], style[0], color=style[1], linewidth=1.4)
        axis.set_title(name, fontsize=9)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    figure.supxlabel("RL step", fontsize=9)
    figure.supylabel("reward, mean over seeds", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main() -> None:
    """Run what is missing, print the tables and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--only", nargs="+", help="names of rows")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "outputs" / "algorithms", help="where the runs are written"
    )
    arguments = parser.parse_args()
    file = RESULTS / "algorithms.json"
    saved = json.loads(file.read_text()) if file.exists() else {}
    known = (
        {tuple(r["overrides"]): r["runs"] for r in saved.get("rows", [])} if saved.get("common") == list(COMMON) else {}
    )
    results = [
        {"name": row.name, "group": row.group, "overrides": list(row.overrides), "runs": known.get(row.overrides, [])}
        for row in ROWS
    ]
    for seed in arguments.seeds:
        for row, result in zip(ROWS, results, strict=True):
            unwanted = (arguments.only and row.name not in arguments.only) or (row.seeds and seed not in row.seeds)
            if unwanted or any(r["seed"] == seed for r in result["runs"]):
                continue
            model = sft(arguments.folder / f"sft_{seed}", seed)
            settings = re.sub(r"[^\w.]+", "-", "_".join(row.overrides))
            found = train(arguments.folder / f"{settings}_{seed}", model, row, seed)
            result["runs"] = sorted([*result["runs"], found], key=lambda r: r["seed"])
            done = [r for r in results if r["runs"]]
            save_result("algorithms", {"common": COMMON, "samples": SAMPLES, "rows": done})
            print(
                f"seed {seed}  {row.name}  {' '.join(row.overrides)}: {found['before']:.3f} → {found['after']:.3f}",
                flush=True,
            )
    done = [r for r in results if r["runs"]]
    for group in ("recipe", "composition", "tuned", "try"):
        if rows := summarised(r for r in done if r["group"] == group):
            print(f"\n{group}\n{table(rows, HEADER)}")
    draw(done, RESULTS / "algorithms.png")
    means = {r["name"]: statistics.fmean(run["after"] for run in r["runs"]) for r in done if r["group"] == "recipe"}
    print("\nalgorithms: " + " ".join(f"{name}={mean:.3f}" for name, mean in means.items()))


if __name__ == "__main__":
    main()
