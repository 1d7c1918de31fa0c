"""Measure an RL step on one rank and on two, for the recipe's model and for one of about 10 M parameters.

    python benchmarks/ranks.py [overrides]

"possible" is the best speed-up that two ranks could reach here: two one-rank runs at the same time each take `slowdown`
times as long as one alone, since they share caches, memory and clock; two ranks that divide a step perfectly gain 2 /
slowdown. Each rank uses one thread. Models are hardly trained and rewards are random, so that completions run to their
limit, no group is silent, and every step has about the same work.
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
WAYS = ("sharded", "replicas")  # two ranks hold half of the parameters each, or all of them (policy.shard=1)
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
        "model.tiny.layers=6",
        "model.tiny.hidden_size=384",
        "model.tiny.intermediate_size=1024",
        "model.tiny.heads=6",
        "model.tiny.kv_heads=2",
        "model.tiny.head_dim=64",
        "rl.steps=6",
        "rollout.batch_size=64",
        "rollout.max_tokens=32",
    ),
}


def seconds(folder: Path) -> dict[str, float]:
    """Return the median seconds of each phase and of the whole step, and the mean number of rollouts."""
    steps = read_metrics(folder, "rl")[WARMUP:]
    phases = {name: median(m["seconds"][name] for m in steps) for name in steps[0]["seconds"]}
    return {
        **phases,
        "step": median(sum(m["seconds"].values()) for m in steps),
        "rollouts": fmean(m["rollouts"] for m in steps),
    }


def measure(folder: Path, settings: tuple[str, ...]) -> dict[str, Any]:
    """Return the seconds of a step on one rank, on two (sharded, replicas), and of two one-rank runs side by side."""
    one = seconds(run_recipe(folder / "one", "ranks=1", *settings))
    two = seconds(run_recipe(folder / "two", "ranks=2", *settings))
    replicas = seconds(run_recipe(folder / "replicas", "ranks=2", "policy.shard=1", *settings))
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(run_recipe, folder / f"beside_{i}", "ranks=1", *settings) for i in range(2)]
        beside = [seconds(run.result()) for run in runs]
    return {
        "one": one,
        "sharded": two,
        "replicas": replicas,
        "beside": {name: fmean(b[name] for b in beside) for name in one},
    }


def main() -> None:
    """Measure each model, print the table and write the results."""
    rows, results = [], {}
    with tempfile.TemporaryDirectory() as temporary:
        for model, settings in MODELS.items():
            results[model] = measured = measure(Path(temporary) / model, (*COMMON, *settings, *sys.argv[1:]))
            one, beside = measured["one"], measured["beside"]
            for name in (n for n in one if n != "rollouts"):
                gains = [one[name] / measured[way][name] for way in WAYS]
                small = one[name] < 0.01 * one["step"]  # the ratio of two small numbers means nothing
                ratios = [""] * 3 if small else [f"{gain:.2f}" for gain in (*gains, 2 * one[name] / beside[name])]
                rows.append((model, name, one[name], *(measured[way][name] for way in WAYS), beside[name], *ratios))
    header = (
        "model",
        "phase",
        "1 rank s",
        *(f"2 {way} s" for way in WAYS),
        "1 beside another s",
        *(f"gain {way}" for way in WAYS),
        "possible",
    )
    print(table(rows, header))
    gains = {f"{model}_{way}": m["one"]["step"] / m[way]["step"] for model, m in results.items() for way in WAYS}
    possible = {model: 2 * m["one"]["step"] / m["beside"]["step"] for model, m in results.items()}
    save_result(
        "ranks",
        {
            "settings": {"common": COMMON, **MODELS},
            "overrides": sys.argv[1:],
            **results,
            "gain": gains,
            "possible": possible,
        },
    )
    print(
        "ranks: "
        + " ".join(
            f"{name}={value:.2f}"
            for name, value in [*gains.items(), *((f"{m}_possible", v) for m, v in possible.items())]
        )
    )


if __name__ == "__main__":
    main()
