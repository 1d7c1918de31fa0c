"""Handover to an engine with memory of its own, by bucket size; and in place. GB/s of the engine's bytes, peak of memory."""

from __future__ import annotations

from functools import partial

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu.measuring import GIB, Bench
from hybrid_rl.attention.attend import ATTENTION_NAME
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.handover import hand_over, take_back
from hybrid_rl.policy.model import Policy

MIB = 2**20


def main(bench: Bench) -> None:
    """The policy's float32 parameters are cast, laid in a bucket, and copied: 4 + 2 + 2 + 2 bytes for each of the engine's 2."""
    policy = bench.policy("0.6B")
    _copied(bench, policy)
    _in_place(bench, policy)


def _copied(bench: Bench, policy: Policy) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        bench.model("0.6B"), dtype=policy.dtype, attn_implementation=ATTENTION_NAME
    )
    own = LocalEngine(model.eval().to(bench.device), policy.end_ids(), 1, 64, policy.device, policy.dtype)
    size = policy.parameter_count() * policy.dtype.itemsize
    hand_over(policy, own, 0, verify=True)
    for mib in (1, 4) if bench.small else (64, 256, 512, 1024, 4096):
        call = partial(hand_over, policy, own, 1, bucket_bytes=mib * MIB)
        seconds = bench.seconds(call, repeats=3, warm=1)
        held = torch.cuda.memory_allocated(bench.device) / GIB if bench.on_gpu else 0.0
        peak, _ = bench.peak(call)
        buckets = policy.buckets(policy.dtype, mib * MIB)
        largest = max(sum(t.nbytes for t in bucket.values()) for bucket in buckets) / MIB
        what, note = f"buckets of {mib} MiB", f"{seconds:.3f} s; largest bucket {largest:.0f} MiB"
        bench.row(what, size / seconds / 1e9, "GB/s", bench.rate("copy") * 2 / 10 / 1e9, note)
        if bench.on_gpu:
            bench.row(f"{what}: rise of memory", (peak - held) * 1024, "MiB", largest)
    take_back(policy, own)


def _in_place(bench: Bench, policy: Policy) -> None:
    """FSDP casts its float32 shards and puts them together in bfloat16: 4 + 2 bytes a parameter, and 2 + 2 to lay them out."""
    shared = LocalEngine(policy.sampler, policy.end_ids(), 1, 64, policy.device, policy.dtype)

    def turn() -> None:
        hand_over(policy, shared, 1)
        take_back(policy, shared)

    seconds = bench.seconds(turn, repeats=3, warm=1)
    bench.row("in place and back", seconds, "s", 10 * policy.parameter_count() / bench.rate("copy"))
