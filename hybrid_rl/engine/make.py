"""Which engine a run samples with, and how much memory it may take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hybrid_rl.config import Config, Deterministic, EngineKind, Offload
from hybrid_rl.engine.base import Engine, EngineError, request_seed
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.engine.sglang.engine import SGLangEngine
from hybrid_rl.engine.sglang.interface import unusable
from hybrid_rl.policy.offload import release_cached
from hybrid_rl.policy.sharding import local

if TYPE_CHECKING:
    from hybrid_rl.policy.model import Policy

ENGINES = {EngineKind.local: "samples from the policy's memory", EngineKind.sglang: "has its own copy of the weights"}


def choose_engine(kind: EngineKind, device: torch.device) -> EngineKind:
    if kind == EngineKind.auto:
        return EngineKind.sglang if device.type == "cuda" and not unusable() else EngineKind.local
    return kind


def make_engine(config: Config, policy: Policy, model_folder: Path, folder: Path | None = None) -> Engine:
    """Return the configured engine; one with memory of its own begins with the model's weights, and writes its log to `folder`. Collective.

    Raises EngineError, on every rank, if it does not start or engine.tensor_parallel does not fit.
    """
    chosen, ranks, capacity = config.engine, policy.ranks, config.rollout.max_prompt_tokens + config.rollout.max_tokens
    width, kind = chosen.tensor_parallel, choose_engine(chosen.kind, policy.device)
    if width > 1 and kind == EngineKind.local:
        raise EngineError(
            f"engine.tensor_parallel={width} is sglang's, and here engine={chosen.kind.value} is local; set it to 1"
        )
    if ranks.local_world % width:
        raise EngineError(f"engine.tensor_parallel={width} does not divide the {ranks.local_world} ranks of a node")
    if kind == EngineKind.local:
        return LocalEngine(policy.sampler, policy.end_ids(), chosen.slots, capacity, policy.device, policy.dtype)
    team, on_gpu = ranks.team(width), policy.device.type == "cuda"
    deterministic = (
        not on_gpu if chosen.deterministic == Deterministic.auto else chosen.deterministic == Deterministic.always
    )
    return ranks.on_all(
        lambda: SGLangEngine(
            model_folder, policy.end_ids(), chosen.slots, capacity, policy.device, policy.dtype, team=team,
            memory_fraction=chosen.memory_fraction or (what_is_left(config, policy) if on_gpu else 1.0), deterministic=deterministic,
            timeout=chosen.timeout, start_timeout=chosen.start_timeout, extra=chosen.arguments,
            seed=request_seed(config.seed, "engine", ranks.rank), log=folder / f"engine_{ranks.rank}.log" if folder else None,
        )
    )  # fmt: skip


def what_is_left(config: Config, policy: Policy) -> float:
    """`memory_fraction` of this rank's GPU as it is before the engine and the optimizer are made."""
    moments = (
        8 * sum(local(p).numel() for p in policy.trainable.values()) if config.policy.offload == Offload.none else 0
    )
    release_cached(policy.device)
    return memory_fraction(torch.cuda.mem_get_info(policy.device)[0], moments + 2 * config.handover.bucket_mib * 2**20)


ENGINE_RESERVE = (
    0.12  # share of the free memory that SGLang needs beside weights and KV cache: activations, CUDA graphs
)


def memory_fraction(free: float, later: float) -> float:
    """The share of `free` bytes that weights and KV cache may take, where the trainer needs `later` bytes of them while the engine samples.

    Raises EngineError where less than a tenth is left.
    """
    left = 1 - ENGINE_RESERVE - later / free
    if left < 0.1:
        raise EngineError(
            f"the engine would have {max(left, 0) * free / 2**30:.1f} GiB of the {free / 2**30:.1f} GiB that are free: the trainer needs "
            f"{later / 2**30:.1f} GiB; try policy.offload=optimizer, a smaller handover.bucket_mib, more ranks, or set engine.memory_fraction"
        )
    return left
