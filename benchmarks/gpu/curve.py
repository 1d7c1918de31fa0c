"""Does the worked example learn in bfloat16 as in float32? Three seeds of each, at the same time on one GPU."""

from __future__ import annotations

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.common import run_recipe
from benchmarks.gpu.measuring import Bench

CPU_REWARD = 0.93  # after RL, in float32 on a CPU: the mean of five seeds


def main(bench: Bench) -> None:
    """Run the recipe on each seed in both types; rewards after SFT and after RL."""
    runs = [(dtype, seed) for dtype in ("float32", "bfloat16") for seed in range(1 if bench.small else 3)]
    short = [
        "sft.steps=4",
        "rl.steps=2",
        "eval.max_tasks=4",
        "rollout.batch_size=16",
        "rollout.group_size=8",
        "algo.minibatches=1",
    ] * bench.small
    with tempfile.TemporaryDirectory() as temporary:

        def run(dtype: str, seed: int) -> dict:
            folder = Path(temporary) / f"{dtype}_{seed}"
            run_recipe(
                folder,
                f"seed={seed}",
                f"policy.dtype={dtype}",
                f"device={bench.device.type}",
                "ranks=1",
                "engine.kind=local",
                *short,
            )
            return json.loads((folder / "summary.json").read_text())

        with ThreadPoolExecutor(1 if bench.small else len(runs)) as pool:
            for (dtype, seed), found in zip(runs, pool.map(lambda pair: run(*pair), runs), strict=True):
                note = f"after SFT {found['eval/sft']:.3f}; {found['seconds']['total']:.0f} s, beside {len(runs) - 1} others"
                bench.row(
                    f"{dtype}, seed {seed}: reward", found["eval/rl"], "", None if bench.small else CPU_REWARD, note
                )
