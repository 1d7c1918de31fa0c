"""Attention of one row, forward and backward, by each kernel: packed samples, and a group tree."""

from __future__ import annotations

import torch

from benchmarks.gpu.measuring import SHAPES, Bench
from hybrid_rl.attention import kernels
from hybrid_rl.attention.attend import AttentionLayout, LayerAttention, Packed
from hybrid_rl.attention.trees import Trees


def main(bench: Bench) -> None:
    """Measure one layer of the 0.6B shape; the prediction is its products at the rate of a large one."""
    _, _, _, heads, kv_heads, size, _ = SHAPES["tiny" if bench.small else "0.6B"]
    scale = 64 if bench.small else 1
    prompt, answer, count = 1024 // scale, 960 // scale, 16
    samples = [2048 // scale] * 8
    packed = 6.0 * heads * size * sum(n * n for n in samples)  # 2 forward and 4 backward, over half a square
    # a branch attends to its prompt and to itself; the prompt to itself once
    tree = 6.0 * heads * size * (prompt**2 + count * ((prompt + answer) ** 2 - prompt**2))
    rows: list[tuple[str, AttentionLayout, int, float]] = [
        (f"packed {len(samples)} × {samples[0]}", Packed(samples), sum(samples), packed),
        (f"tree {prompt} + {count} × {answer}", Trees([(prompt, [answer] * count)]), prompt + count * answer, tree),
    ]
    names = [(kernel.name, (kernel,)) for kernel in kernels.KERNELS]
    for name, chosen in [*names, (kernels.WITHOUT, ())]:
        if chosen and (problem := kernels.fails(chosen[0], bench.device, bench.dtype)):
            bench.row(name, 0.0, "", None, problem)
            continue
        before, kernels.KERNELS = kernels.KERNELS, chosen
        for what, layout, tokens, work in rows:
            q, k, v = (
                torch.randn(1, h, tokens, size, device=bench.device, dtype=bench.dtype, requires_grad=True)
                for h in (heads, kv_heads, kv_heads)
            )
            layout = layout.to(bench.device)

            def both(layout: AttentionLayout = layout, q=q, k=k, v=v) -> None:
                layout.attend(0, q, k, v, LayerAttention(size**-0.5)).sum().backward()

            seconds, (peak, _) = bench.seconds(both), bench.peak(both)
            floor = work / bench.rate("product")
            bench.row(f"{what}, {name}", seconds * 1e3, "ms", floor * 1e3, f"forward and backward, peak {peak:.2f} GiB")
        kernels.KERNELS = before
