"""Forward and backward of a row: tokens/s and share of the GPU's rate, and the peak of memory against the plan."""

from __future__ import annotations

import gc

import torch

from benchmarks.gpu.measuring import GIB, SHAPES, Bench, attention_work, group, matrices
from hybrid_rl.attention import kernels
from hybrid_rl.config import Config, OptimizerConfig
from hybrid_rl.policy.layout import Layout, pack
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.optimizer import make_optimizer
from hybrid_rl.preflight.budget import Sizes, memory_by_phase
from hybrid_rl.types import PackedBatch, Rollout

PROMPT, SAMPLED = 64, 448


def main(bench: Bench) -> None:
    """Each shape with and without activation checkpointing, rows of 2k, 8k and 16k tokens, each kernel."""
    rows = (1024, 2048) if bench.small else (2048, 8192, 16384)
    for shape in list(SHAPES)[:1] if bench.small else list(SHAPES)[:2]:
        for checkpointing in (False, True):
            policy = bench.policy(shape, activation_checkpointing=checkpointing)
            optimizer = make_optimizer(policy, OptimizerConfig(), 10)
            label = f"{shape}{', checkpointing' * checkpointing}"
            for tokens in rows:
                _row(bench, policy, label, tokens)
            if not checkpointing:
                _step(bench, policy, optimizer, shape)
                _layouts(bench, policy, shape)
                _chunks(bench, policy, shape)
            del policy, optimizer
            gc.collect()
            if bench.on_gpu:
                torch.cuda.empty_cache()


def _row(bench: Bench, policy: Policy, label: str, tokens: int) -> None:
    count = tokens // (PROMPT + SAMPLED)
    rollouts = [r for i in range(count) for r in group(PROMPT, SAMPLED, 1, policy.vocabulary, i)]
    policy.settings.row_tokens = tokens
    (row,) = (made.to(bench.device) for made in pack(rollouts, "packed", tokens))
    work = _work(policy, rollouts)
    plan = sum(planned(policy, bench.device).values())
    fitting = [kernel for kernel in kernels.KERNELS if not kernels.fails(kernel, bench.device, bench.dtype)]
    before = kernels.KERNELS
    for name, chosen in [*((kernel.name, (kernel,)) for kernel in fitting), (kernels.WITHOUT, ())]:
        if chosen == () and fitting and tokens != 8192:
            continue  # the slowest way once is enough
        kernels.KERNELS = chosen
        what = f"{label}, row {tokens:,}, {name}"
        try:
            seconds = bench.seconds(lambda: _backward(policy, row), repeats=3, warm=1)
            peak, reserved = bench.peak(lambda: _backward(policy, row))
        except torch.OutOfMemoryError as error:
            bench.row(what, 0.0, "tokens/s", None, f"out of memory; the plan says {plan:.1f} GiB: {str(error)[:100]}")
            continue
        finally:
            kernels.KERNELS = before
        share = work / seconds / bench.rate("product")
        bench.row(
            what,
            tokens / seconds,
            "tokens/s",
            tokens * bench.rate("product") / work,
            f"MFU {share:.1%} of the product's rate",
        )
        if bench.on_gpu:
            bench.row(f"{what}: peak", peak, "GiB", plan, f"allocated, against the plan; reserved {reserved:.1f} GiB")


def _work(policy: Policy, rollouts: list[Rollout]) -> float:
    body, head = matrices(policy)
    lengths = [len(r.token_ids) for r in rollouts]
    return 6.0 * (body * sum(lengths) + head * sum(r.sampled for r in rollouts)) + 3 * attention_work(policy, lengths)


def _backward(policy: Policy, row: PackedBatch) -> None:
    logprobs, _ = policy.logprobs(row, 1.0)
    (logprobs.sum() * 1e-3).backward()


def planned(policy: Policy, device: torch.device) -> dict[str, float]:
    """Return the GiB of the plan (dry_run=true) for training this policy, by item."""
    sizes = Sizes(policy.config, policy.parameter_count(), policy.parameter_count(), {})
    return memory_by_phase(Config(policy=policy.settings), sizes, device, policy.ranks)["training"]


def _step(bench: Bench, policy: Policy, optimizer, shape: str) -> None:
    """AdamW reads parameter, gradient and moments and writes all but the gradient: 28 bytes a parameter, and 8 to clip."""

    def step() -> None:
        for parameter in policy.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()

    zeros = 4 * policy.parameter_count()
    seconds = bench.seconds(step, repeats=3, warm=1)
    floor = (36 * policy.parameter_count() + zeros) / bench.rate("copy")
    bench.row(f"{shape}, AdamW step", seconds * 1e3, "ms", floor * 1e3, "with gradients set to 0 and clipped")


def _layouts(bench: Bench, policy: Policy, shape: str) -> None:
    """The same group of 16 as packed samples and as a tree: its long prompt 16 times, or once."""
    prompt, sampled = (64, 32) if bench.small else (512, 256)
    rollouts = group(prompt, sampled, 16, policy.vocabulary)
    layouts: tuple[Layout, ...] = ("packed", "trees")
    for layout in layouts:
        rows = [row.to(bench.device) for row in pack(rollouts, layout, 16 * (prompt + sampled))]
        seconds = bench.seconds(lambda rows=rows: [_backward(policy, row) for row in rows], repeats=3, warm=1)
        tokens = sum(len(row.input_ids) for row in rows)
        body, head = matrices(policy)
        floor = 6.0 * (body * tokens + head * 16 * sampled) / bench.rate("product")
        bench.row(
            f"{shape}, 16 × ({prompt} + {sampled}), {layout}", seconds, "s", floor, f"{tokens:,} tokens in the layers"
        )


def _chunks(bench: Bench, policy: Policy, shape: str) -> None:
    """Chunks of logits: the head's work, from 256 MiB to what was chosen for this GPU."""
    rollouts = [r for i in range(4) for r in group(PROMPT, SAMPLED, 1, policy.vocabulary, i)]
    (row,) = (made.to(bench.device) for made in pack(rollouts, "packed", 4096))
    chosen = policy.chunk
    for chunk in sorted({max(1, 2**26 // policy.vocabulary), chosen}):
        policy.chunk = chunk
        seconds, (peak, _) = (
            bench.seconds(lambda: _backward(policy, row), repeats=3),
            bench.peak(lambda: _backward(policy, row)),
        )
        gib = 4 * chunk * policy.vocabulary / GIB
        bench.row(
            f"{shape}, {chunk:,} tokens of logits at a time",
            seconds * 1e3,
            "ms",
            None,
            f"{gib:.2f} GiB of float32; peak {peak:.1f} GiB",
        )
    policy.chunk = chosen
