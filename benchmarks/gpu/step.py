"""Whole RL steps of the 0.6B shape by the command itself: seconds of each phase, memory allocated, reserved, and of the device."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

from benchmarks.common import read_metrics, run_recipe
from benchmarks.gpu.measuring import Bench, matrices
from hybrid_rl.engine.sglang.interface import unusable


def main(bench: Bench) -> None:
    """The local engine, and SGLang if it is installed: 8 tasks × 16 rollouts of 128 tokens."""
    model, steps = bench.model("0.6B"), 2 if bench.small else 5
    policy = bench.policy("0.6B")
    body, head = matrices(policy)
    read = policy.parameter_count() * policy.dtype.itemsize
    del policy
    for kind in ["local"] + ["sglang"] * (bench.on_gpu and not unusable()):
        with tempfile.TemporaryDirectory() as temporary:
            count, tokens = (16, 16) if bench.small else (128, 128)
            folder = run_recipe(
                Path(temporary) / "run", "preset=qwen3", f"model.path={model}", f"device={bench.device.type}", "ranks=1", f"engine.kind={kind}",
                "sft.steps=0", f"rl.steps={steps}", "rl.checkpoint_every=1000", "eval.max_tasks=4", "policy.dtype=bfloat16",
                "reward._target_=benchmarks.common.aimless_reward", "rollout.max_replacements=0", f"rollout.batch_size={count}",
                f"rollout.group_size={min(16, count // 2)}", f"rollout.max_tokens={tokens}",
            )  # fmt: skip
            lines = read_metrics(folder, "rl")[1:]
        total = median(sum(m["seconds"].values()) for m in lines)
        trained = median(m["length"] * m["rollouts"] for m in lines)
        floors = {
            "rollout": tokens * read / bench.rate("copy"),
            "update": 6 * (body + head) * trained / bench.rate("product"),
            "handover": 3 * read / bench.rate("copy"),
        }
        for name in lines[0]["seconds"]:
            seconds = median(m["seconds"][name] for m in lines)
            bench.row(f"{kind}: {name}", seconds, "s", floors.get(name), f"{seconds / total:.0%} of a step")
        last = lines[-1]
        for name, key in (
            ("allocated", "memory_gib"),
            ("reserved", "memory_reserved_gib"),
            ("of the device", "memory_device_gib"),
        ):
            if last[key] is not None:
                bench.row(f"{kind}: peak memory {name}", last[key], "GiB")
        bench.row(
            f"{kind}: mismatch",
            max(m["mismatch_kl"] for m in lines),
            "nats",
            1e-3,
            "published runs in bfloat16: 1e-5 to 1e-3",
        )
