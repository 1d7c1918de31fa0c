"""Compare hybrid_rl and TRL's GRPOTrainer in seconds a step: same checkpoint, tasks and counts, alternating.

    python benchmarks/vs_trl.py [--pairs 3] [--steps 10]

The checkpoint is the recipe's after SFT. Both sides sample 8 tasks × 16 completions a step at temperature 1 and take
one AdamW step, on one CPU thread. TRL runs in its own environment (benchmarks/.venv-trl, created on the first call).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

from common import read_metrics, run_recipe, save_result, table

HERE = Path(__file__).parent
VENV = HERE / ".venv-trl"
PACKAGES = ("trl==1.16.0", "transformers==5.24.0", "accelerate==1.15.0", "datasets==5.2.0")
WARMUP = 2  # first steps of each run that are not measured


def trl_python() -> str:
    """Return the Python of TRL's environment; create the environment if it is missing."""
    python = VENV / "bin" / "python"
    if not (VENV / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "torch==2.13.0"], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        (VENV / "installed").touch()
    return str(python)


def ours(folder: Path, model: Path, lr: float, steps: int) -> dict[str, Any]:
    """Return the measurements of one run without SFT; a step has all phases, from sampling to the handover."""
    optimizer = {"lr": lr, "schedule": "constant", "warmup_steps": 0}
    run_recipe(
        folder,
        f"model.path={model}",
        "sft.steps=0",
        f"rl.steps={steps}",
        f"rl.checkpoint_every={steps}",
        *(f"rl.optimizer.{name}={value}" for name, value in optimizer.items()),
        "algo.minibatches=1",
        "eval.max_tasks=1",
        "rollout.max_replacements=0",
        "threads=1",
        "device=cpu",
        "ranks=1",
    )
    measured = read_metrics(folder, "rl")[WARMUP:]
    return {
        "seconds_per_step": median(sum(m["seconds"].values()) for m in measured),
        "generate_seconds": median(m["seconds"]["rollout"] for m in measured),
        "transitions": median(m["seconds"]["sleep"] + m["seconds"]["handover"] for m in measured),
        "tokens_per_step": fmean(m["length"] * 128 for m in measured),
        "rollouts": [m["rollouts"] for m in measured],
        "reward": [m["reward"] for m in measured],
        "mismatch_kl": max(m["mismatch_kl"] for m in measured),
    }


def theirs(folder: Path, model: Path, tasks: Path, lr: float, steps: int) -> dict[str, Any]:
    """Return the measurements of one run of TRL."""
    out = folder.with_suffix(".json")
    options = {
        "model": model,
        "prompts": tasks,
        "steps": steps,
        "warmup": WARMUP,
        "group-size": 16,
        "batch-size": 128,
        "max-tokens": 128,
        "temperature": 1.0,
        "lr": lr,
        "threads": 1,
        "out": out,
    }
    command = [trl_python(), str(HERE / "trl_side.py")]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    subprocess.run(command, check=True)
    return json.loads(out.read_text())


def task_file(folder: Path, path: Path) -> None:
    """Write the tasks of the steps of hybrid_rl's run, in their order, for TRL."""
    from hybrid_rl.recipes.reverse import load_tasks

    from hybrid_rl.preflight.settings import load
    from hybrid_rl.run_folder.rollouts import read_rollouts

    data = dict(load(["+recipe=reverse"]).data)
    by_id = {task.id: task for task in load_tasks(**{k: v for k, v in data.items() if k != "_target_"}).rl}
    lines = []
    for file in sorted((folder / "rollouts").glob("step_*.parquet")):
        ids = dict.fromkeys(row["task_id"] for row in read_rollouts(file, ["task_id"]))  # each once, in order
        lines += [json.dumps({"messages": list(by_id[i].messages), "answer": by_id[i].answer}) for i in ids]
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Run both sides in turn, print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="how often both sides run, in turn")
    parser.add_argument("--steps", type=int, default=10, help=f"RL steps of each run, the first {WARMUP} not counted")
    arguments = parser.parse_args()
    trl_python()
    rows, pairs = [], []
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        warm = run_recipe(root / "warm", "rl.steps=0", "seed=0", "threads=1", "device=cpu", "ranks=1")
        lr = 1e-4  # small, so that both sides keep sampling completions of about the same length
        for pair in range(arguments.pairs):
            mine = ours(root / f"ours_{pair}", warm / "final", lr, arguments.steps)
            task_file(root / f"ours_{pair}", root / "tasks.jsonl")
            other = theirs(root / f"trl_{pair}", warm / "final", root / "tasks.jsonl", lr, arguments.steps)
            ratio = other["seconds_per_step"] / mine["seconds_per_step"]
            pairs.append({"hybrid_rl": mine, "trl": other, "ratio": ratio})
            for name, side in (("hybrid_rl", mine), ("TRL", other)):
                speed = side["tokens_per_step"] / side["seconds_per_step"]
                seconds = side["seconds_per_step"], side["generate_seconds"]
                rows.append((pair, name, *seconds, f"{side['tokens_per_step']:.0f}", f"{speed:.0f}"))
            rows.append((pair, "ratio", ratio, other["generate_seconds"] / mine["generate_seconds"], "", ""))
    print(table(rows, ("pair", "side", "s a step", "of it sampling", "tokens a step", "tokens/s")))
    ratio = median(pair["ratio"] for pair in pairs)
    share = median(pair["hybrid_rl"]["transitions"] / pair["hybrid_rl"]["seconds_per_step"] for pair in pairs)
    save_result("vs_trl", {"ratio": ratio, "transitions_share": share, "pairs": pairs, "steps": arguments.steps})
    print(f"vs_trl: ratio={ratio:.2f}")


if __name__ == "__main__":
    main()
