"""Measure the handover of weights from policy to engine: bytes, seconds, and the ratio to a lower bound.

    python benchmarks/handover.py [--models 10M 135M 600M] [--ranks 1 2]

The lower bounds move the same bytes in the same process, alternating with the handover and into memory that was touched
before: "copy" is one copy_ per tensor into the engine's weights; "gather" is what ranks need before that, all_gather
over gloo. For an engine that shares the policy's parameters nothing is copied: on one rank it gets a new version
number, on several ranks the parameters are unsharded in place. Each rank uses one thread.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from common import save_result, table
from torch import Tensor

from hybrid_rl.attention.attend import ATTENTION_NAME
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.handover import BUCKET_BYTES, hand_over, take_back
from hybrid_rl.policy import tiny
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.sharding import local
from hybrid_rl.policy.torch_private import all_gather_single
from hybrid_rl.processes.launch import end_with_launcher, launch
from hybrid_rl.processes.ranks import Ranks, join

CPU = torch.device("cpu")
MIB = 2**20
REPEATS = 5
SWEEP = (1, 16, 64, 512)  # MiB per bucket, smallest first, so that memory that malloc keeps does not help the next size
# layers, hidden, intermediate, heads, kv heads, head dimension, vocabulary
SHAPES = {
    "10M": (6, 384, 1024, 6, 2, 64, 2048),
    "135M": (30, 576, 1536, 9, 3, 64, 49_152),
    "600M": (28, 1024, 3072, 16, 8, 128, 151_936),
}


def build(folder: Path, shape: tuple[int, ...]) -> Path:
    """Write a random model of the shape, with a tokenizer, and return its folder."""
    layers, hidden, inner, heads, kv_heads, head_dim, vocabulary = shape
    config = transformers.Qwen3Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    tiny.character_tokenizer([]).save_pretrained(folder)
    return folder


# ---- on the ranks --------------------------------------------------------------------------------------------------


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Return the measurements of one model on the ranks that were started; {} on ranks other than 0."""
    end_with_launcher()
    ranks = join(300, "cpu")
    torch.set_num_threads(1)
    policy = Policy.load(folder, CPU, ranks=ranks)
    scratch = torch.ones(
        max(BUCKET_BYTES // 4, *(p.numel() for p in policy.parameters.values())) // ranks.world * ranks.world
    )
    result = {"rows": [row(name, "shares", policy, policy.sampler, scratch)], "sweep": []}
    for dtype in [torch.float32] if ranks.world > 1 else [torch.float32, torch.bfloat16]:
        model = own_model(policy, dtype)
        result["rows"].append(row(name, str(dtype).removeprefix("torch."), policy, model, scratch))
        if name == "135M" and ranks.world > 1:
            result["sweep"] = sweep(policy, engine_of(policy, model), scratch)
        del model
    return result if ranks.main else {}


def engine_of(policy: Policy, model: transformers.PreTrainedModel) -> LocalEngine:
    """Return a local engine on `model`."""
    return LocalEngine(model, policy.end_ids(), 1, 64, dtype=policy.dtype if model is policy.sampler else model.dtype)


def own_model(policy: Policy, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Return a copy of the model with memory of its own, filled with zeros."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            policy.config, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    model.to_empty(device=CPU).tie_weights()
    for parameter in model.parameters():
        parameter.detach().zero_()
    return model


def row(name: str, kind: str, policy: Policy, model: transformers.PreTrainedModel, scratch: Tensor) -> dict[str, Any]:
    """Return the seconds of a handover and its lower bounds for one engine."""
    engine, ranks, moved = engine_of(policy, model), policy.ranks, 0
    shares = engine.shares(policy.sampler)

    def handover() -> None:
        nonlocal moved
        moved = hand_over(policy, engine, 1)

    steps: dict[str, Callable[[], object]] = {"handover": handover, "back": lambda: take_back(policy, engine)}
    if ranks.world > 1:
        steps = {"gather": lambda: gather(ranks, policy.parameter_count(), scratch), **steps}
    if not shares:
        pairs = copies(policy, model, scratch)
        steps = {"copy": lambda: copy(pairs), **steps}
    hand_over(policy, engine, 0, verify=True)
    take_back(policy, engine)
    seconds = in_turn(ranks, steps)
    if shares and ranks.world > 1:
        moved = policy.parameter_count() * policy.dtype.itemsize
    return {"model": name, "ranks": ranks.world, "engine": kind, "bytes": moved, "seconds": seconds}


def sweep(policy: Policy, engine: LocalEngine, scratch: Tensor) -> list[dict[str, Any]]:
    """Return seconds and peak memory of a handover for each bucket size."""
    rows, ranks = [], policy.ranks
    for mib in SWEEP:
        handover = lambda mib=mib: hand_over(policy, engine, 1, bucket_bytes=mib * MIB)  # noqa: E731
        peak = max(ranks.all_gather(peak_mib(handover)))
        seconds = in_turn(
            ranks, {"gather": lambda: gather(ranks, policy.parameter_count(), scratch), "handover": handover}
        )
        largest = (
            max(sum(t.nbytes for t in bucket.values()) for bucket in policy.buckets(engine.dtype, mib * MIB)) / MIB
        )
        rows.append({"mib": mib, "largest": largest, "peak_mib": peak, "seconds": seconds})
    held = {
        "shard_mib": sum(local(p).nbytes for p in policy.parameters.values()),
        "engine_mib": sum(p.nbytes for p in engine.model.parameters()),
    }
    return [{**row, **{name: size / MIB for name, size in held.items()}} for row in rows]


@torch.no_grad()
def copies(policy: Policy, model: transformers.PreTrainedModel, scratch: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return (engine's tensor, source) pairs: sources are the policy's tensors, or parts of `scratch` if sharded."""
    pairs, start = [], 0
    for name, target in model.named_parameters():
        source = policy.parameters[name]
        if policy.ranks.world > 1:
            start = start if start + target.numel() <= len(scratch) else 0
            source = scratch[start : start + target.numel()].view(target.shape)
            start += target.numel()
        pairs.append((target.detach(), source.detach()))
    return pairs


def copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy each source to its target."""
    for target, source in pairs:
        target.copy_(source)


def gather(ranks: Ranks, elements: int, scratch: Tensor) -> None:
    """Gather `elements` float32 numbers over all ranks, in a few large messages."""
    while elements > 0:
        share = min(len(scratch), elements) // ranks.world
        out = scratch[: share * ranks.world]
        all_gather_single(out, out[share * ranks.rank :][:share])
        elements -= len(scratch)


def in_turn(ranks: Ranks, steps: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median seconds of each step on the slowest rank, after a warm-up round."""
    rounds = []
    for _ in range(REPEATS + 1):
        rounds.append([])
        for step in steps.values():
            ranks.agree()  # all start together
            start = time.perf_counter()
            step()
            rounds[-1].append(time.perf_counter() - start)
    everyone = ranks.all_gather(rounds[1:])
    return {name: median(max(own[i][s] for own in everyone) for i in range(REPEATS)) for s, name in enumerate(steps)}


def peak_mib(function: Callable[[], object]) -> float:
    """Return by how many MiB the resident memory of this process rises while `function` runs.

    Linux only. The kernel's peak (VmHWM) can be reset, and psutil does not report it.
    """
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status_mib("VmRSS")
    function()
    return status_mib("VmHWM") - before


def status_mib(field: str) -> float:
    """Return a field of /proc/self/status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


# ---- the benchmark -------------------------------------------------------------------------------------------------


def main() -> None:
    """Start the ranks for each model and number of ranks, print the tables and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    arguments = parser.parse_args()
    rows, sizes = [], []
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.models:
            folder = build(Path(temporary) / name, SHAPES[name])
            for world in arguments.ranks:
                out = folder / "measured.json"
                if launch(world, [__file__, "--measure", name, str(folder), str(out)]):
                    sys.exit(1)
                result = json.loads(out.read_text())
                rows, sizes = rows + result["rows"], sizes + result["sweep"]
                print(
                    f"{name} on {world} rank(s):",
                    *(f"{r['engine']} {r['seconds']['handover']:.3f} s" for r in result["rows"]),
                    flush=True,
                )
    print(
        table(
            [line(r) for r in rows],
            ("model", "ranks", "engine", "MB", "s", "GB/s", "copy s", "× copy", "gather s", "× gather", "× both"),
        )
    )
    if sizes:
        print(
            f"\nbucket sizes, 135M on 2 ranks; before: shard {sizes[0]['shard_mib']:.0f} MiB, "
            f"engine {sizes[0]['engine_mib']:.0f} MiB"
        )
        print(table([size_line(s) for s in sizes], ("bucket MiB", "largest MiB", "s", "× gather", "peak − before MiB")))
    save_result("handover", {"rows": rows, "sweep": sizes})
    one = {f"{r['model']}_{r['engine']}": r["seconds"] for r in rows if r["ranks"] == 1}
    ratios = " ".join(f"{name}={s['handover'] / s['copy']:.2f}" for name, s in one.items() if "copy" in s)
    print(f"\nhandover: one rank, × copy: {ratios}")


def line(r: dict[str, Any]) -> tuple[Any, ...]:
    """Return a row of the table."""
    seconds, copied, gathered = r["seconds"]["handover"], r["seconds"].get("copy"), r["seconds"].get("gather")
    ratio = lambda floor: f"{seconds / floor:.2f}" if floor else ""  # noqa: E731
    rate = f"{r['bytes'] / seconds / 1e9:.2f}" if r["bytes"] else ""
    floors = (
        copied or "",
        ratio(copied),
        gathered or "",
        ratio(gathered),
        ratio(copied and gathered and copied + gathered),
    )
    return (r["model"], r["ranks"], r["engine"], f"{r['bytes'] / 1e6:.0f}", f"{seconds:.4f}", rate, *floors)


def size_line(s: dict[str, Any]) -> tuple[Any, ...]:
    """Return a row of the table of bucket sizes."""
    seconds = s["seconds"]["handover"]
    return (s["mib"], f"{s['largest']:.0f}", seconds, f"{seconds / s['seconds']['gather']:.2f}", f"{s['peak_mib']:.0f}")


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if sys.argv[1:2] == ["--measure"]:
        name, folder, out = sys.argv[2:]
        if result := measure(name, Path(folder)):
            Path(out).write_text(json.dumps(result))
    else:
        main()
