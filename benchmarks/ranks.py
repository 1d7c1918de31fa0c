"""Seconds of an RL step on one rank and on two, for the recipe's model and for one of about 10 M parameters.

    python benchmarks/ranks.py [overrides]

The floor is what two ranks could gain here at best: two one-rank runs at the same time each take `slowdown` times as long as
one alone, since they share caches, memory and clock; two ranks that divide a step perfectly then gain 2 / slowdown.
One thread a rank. Hardly trained models and a reward without a goal: completions run to their limit, no group is silent,
so every step has about the same work.
"""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median
from typing import Any

from common import read_metrics, run_recipe, save_result, table

WARMUP = 2
COMMON = (
    "threads=1",
    "device=cpu",
    "eval.max_tasks=8",
    "rl.checkpoint_every=1000",
    "sft.steps=2",
    "sft.optimizer.lr=1e-4",
    "rl.optimizer.lr=1e-5",
    "reward._target_=benchmarks.common.aimless_reward",
)
MODELS = {
    "tiny": ("rl.steps=10", "rollout.max_tokens=32"),
    "10M": (
        "model.tiny.layers=6", "model.tiny.hidden_size=384", "model.tiny.intermediate_size=1024", "model.tiny.heads=6",
        "model.tiny.kv_heads=2", "model.tiny.head_dim=64",
        "rl.steps=6", "rollout.batch_size=64", "rollout.max_tokens=32",
    ),
}  # fmt: skip


def seconds(folder: Path) -> dict[str, float]:
    """Median of each phase and of the whole step, and what a step was trained on."""
    steps = read_metrics(folder, "rl")[WARMUP:]
    phases = {name: median(m["seconds"][name] for m in steps) for name in steps[0]["seconds"]}
    return {**phases, "step": median(sum(m["seconds"].values()) for m in steps), "rollouts": fmean(m["rollouts"] for m in steps)}


def measure(folder: Path, settings: tuple[str, ...]) -> dict[str, Any]:
    one = seconds(run_recipe(folder / "one", "ranks=1", *settings))
    two = seconds(run_recipe(folder / "two", "ranks=2", *settings))
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(run_recipe, folder / f"beside_{i}", "ranks=1", *settings) for i in range(2)]
        beside = [seconds(run.result()) for run in runs]
    return {"one": one, "two": two, "beside": {name: fmean(b[name] for b in beside) for name in one}}


def main() -> None:
    rows, results = [], {}
    with tempfile.TemporaryDirectory() as temporary:
        for model, settings in MODELS.items():
            results[model] = measured = measure(Path(temporary) / model, (*COMMON, *settings, *sys.argv[1:]))
            one, two, beside = measured["one"], measured["two"], measured["beside"]
            for name in (n for n in one if n != "rollouts"):
                gain, possible = one[name] / two[name], 2 * one[name] / beside[name]
                small = one[name] < 0.01 * one["step"]  # nothing to gain, and the ratio of two small numbers says nothing
                ratios = ("", "", "") if small else (f"{gain:.2f}", f"{possible:.2f}", f"{gain / possible:.0%}")
                rows.append((model, name, one[name], two[name], beside[name], *ratios))
    print(table(rows, ("model", "phase", "1 rank s", "2 ranks s", "1 rank beside another s", "gain", "possible", "share")))
    gains = {model: m["one"]["step"] / m["two"]["step"] for model, m in results.items()}
    possible = {model: 2 * m["one"]["step"] / m["beside"]["step"] for model, m in results.items()}
    save_result(
        "ranks", {"settings": {"common": COMMON, **MODELS}, "overrides": sys.argv[1:], **results, "gain": gains, "possible": possible}
    )
    print("ranks: " + " ".join(f"{m}_gain={gains[m]:.2f} {m}_possible={possible[m]:.2f}" for m in gains))


if __name__ == "__main__":
    main()
