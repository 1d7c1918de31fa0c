"""Measure the phases of an RL step, and the share of the machine's matrix-product rate that sampling and update reach.

    python benchmarks/phases.py [overrides]

The lower bound ("floor") of a phase is its floating-point work divided by the rate of a float32 product of the model's
shapes, measured in the same call with the same number of threads. Work: 2 operations per parameter and token in a
forward pass, 6 in forward and backward; embeddings are looked up, and the head runs on sampled tokens only.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median

from common import matmul_gflops, read_metrics, run_recipe, save_result, table

WARMUP = 2


def main() -> None:
    """Run the recipe, print the table and write the results."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = run_recipe(Path(temporary) / "run", "threads=1", *sys.argv[1:])
        steps = read_metrics(folder, "rl")[WARMUP:]
        config = json.loads((folder / "final" / "config.json").read_text())
        tokens = token_counts(folder, [m["step"] for m in steps])
    import torch

    torch.set_num_threads(1)
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads, head_dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    body, head = config["num_hidden_layers"] * layer, hidden * vocabulary
    sampled, tree = tokens["sampled"], tokens["tree"]
    work = {"rollout": 2 * (body * tree + head * sampled), "update": 6 * (body * tree + head * sampled)}
    # 128 rows as in a decoding step, 2048 as in a training row
    rate = {"rollout": matmul_gflops(128, hidden, inner), "update": matmul_gflops(2048, hidden, inner)}

    total = median(sum(m["seconds"].values()) for m in steps)
    rows = []
    for name in steps[0]["seconds"]:
        seconds = median(m["seconds"][name] for m in steps)
        floor = work[name] / rate[name] / 1e9 if name in work else 0.0
        rows.append((name, seconds, f"{seconds / total:.1%}", floor or "", f"{floor / seconds:.1%}" if floor else ""))
    rows.append(("step", total, "100%", sum(work[n] / rate[n] / 1e9 for n in work), ""))
    print(table(rows, ("phase", "median s", "share", "floor s", "of the floor's rate")))
    transitions = median(m["seconds"]["sleep"] + m["seconds"]["handover"] for m in steps) / total
    seconds = {name: median(m["seconds"][name] for m in steps) for name in work}
    print(
        f"\nsampled {sampled:.0f} tokens a step, {sampled / seconds['rollout']:,.0f} tokens/s while sampling; "
        f"trained {tree:.0f} tree tokens a step"
    )
    print(
        f"matrix products: {rate['rollout']:.0f} GFLOP/s at 128 rows, {rate['update']:.0f} at 2,048; "
        f"transitions {transitions:.2%} of a step"
    )
    share = {name: work[name] / rate[name] / 1e9 / seconds[name] for name in work}
    save_result(
        "phases",
        {"rows": rows, "work": work, "gflops": rate, "share_of_floor": share, "transitions": transitions, **tokens},
    )
    print(
        f"phases: step_s={total:.3f} sampled_tokens_per_s={sampled / seconds['rollout']:.0f} "
        f"rollout_floor_share={share['rollout']:.3f} update_floor_share={share['update']:.3f} "
        f"transitions={transitions:.4f} mismatch_kl={max(m['mismatch_kl'] for m in steps):.1e}"
    )


def token_counts(folder: Path, steps: list[int]) -> dict[str, float]:
    """Return means per step: sampled tokens, and tokens of the group trees (each prompt once)."""
    from hybrid_rl.run_folder.rollouts import read_rollouts

    sampled, tree = [], []
    for step in steps:
        rows = read_rollouts(
            folder / "rollouts" / f"step_{step:04d}.parquet", ["group_id", "prompt_length", "loss_mask"]
        )
        sampled.append(sum(sum(row["loss_mask"]) for row in rows))
        tree.append(sampled[-1] + sum({row["group_id"]: row["prompt_length"] for row in rows}.values()))
    return {"sampled": fmean(sampled), "tree": fmean(tree)}


if __name__ == "__main__":
    main()
