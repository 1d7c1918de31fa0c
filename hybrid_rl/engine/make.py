"""Choose the engine that a run samples with, and how much memory it may take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hybrid_rl.config import Config, Deterministic, EngineKind
from hybrid_rl.engine.base import Engine, EngineError, request_seed
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.engine.sglang.engine import SGLangEngine
from hybrid_rl.engine.sglang.interface import unusable
from hybrid_rl.engine.sglang.options import SGLangOptions
from hybrid_rl.processes.ranks import Ranks

ENGINES = {EngineKind.local: "samples from the policy's memory", EngineKind.sglang: "has its own copy of the weights"}


def choose_engine(kind: EngineKind, device: torch.device) -> EngineKind:
    """Return the engine that `kind` means on this device."""
    if kind == EngineKind.auto:
        return EngineKind.sglang if device.type == "cuda" and not unusable() else EngineKind.local
    return kind


@dataclass(frozen=True, slots=True)
class Sampled:
    """The model that an engine samples from."""

    folder: Path  # an engine with its own memory reads the model from here
    module: PreTrainedModel  # an engine without its own memory computes with this
    end_ids: frozenset[int]
    device: torch.device
    dtype: torch.dtype
    ranks: Ranks
    later: int = 0  # bytes of the GPU's free memory that the trainer needs while the engine samples


def make_engine(config: Config, model: Sampled, folder: Path | None = None) -> Engine:
    """Return the configured engine. Collective.

    An engine with its own memory begins with the weights in the model's folder, and writes its log to `folder`.
    Raises EngineError, on every rank, if the engine does not start or engine.tensor_parallel does not fit.
    """
    chosen, ranks, capacity = config.engine, model.ranks, config.rollout.max_prompt_tokens + config.rollout.max_tokens
    width, kind = chosen.tensor_parallel, choose_engine(chosen.kind, model.device)
    if width > 1 and kind == EngineKind.local:
        raise EngineError(
            f"engine.tensor_parallel={width} needs sglang, and here engine={chosen.kind.value} is local; set it to 1"
        )
    if ranks.local_world % width:
        raise EngineError(f"engine.tensor_parallel={width} does not divide the {ranks.local_world} ranks of a node")
    if kind == EngineKind.local:
        return LocalEngine(model.module, model.end_ids, chosen.slots, capacity, model.device, model.dtype)
    team, on_gpu = ranks.team(width), model.device.type == "cuda"

    def options() -> SGLangOptions:
        fraction, automatic = chosen.memory_fraction or 1.0, chosen.deterministic == Deterministic.auto
        if on_gpu and not chosen.memory_fraction:
            fraction = memory_fraction(torch.cuda.mem_get_info(model.device)[0], model.later)
        return SGLangOptions(
            model.device,
            model.dtype,
            memory_fraction=fraction,
            deterministic=not on_gpu if automatic else chosen.deterministic == Deterministic.always,
            seed=request_seed(config.seed, "engine", ranks.rank),
            timeout=chosen.timeout,
            start_timeout=chosen.start_timeout,
            log=folder / f"engine_{ranks.rank}.log" if folder else None,
            arguments=chosen.arguments,
        )

    return ranks.on_all(lambda: SGLangEngine(model.folder, model.end_ids, chosen.slots, capacity, options(), team))


ENGINE_RESERVE = 0.12  # share of the free memory that SGLang needs for activations and CUDA graphs


def memory_fraction(free: float, later: float) -> float:
    """Return the share of `free` bytes that weights and KV cache may take.

    The trainer needs `later` bytes while the engine samples. Raises EngineError if less than a tenth is left.
    """
    left = 1 - ENGINE_RESERVE - later / free
    if left < 0.1:
        raise EngineError(
            f"the engine would have {max(left, 0) * free / 2**30:.1f} GiB of the {free / 2**30:.1f} GiB that are free: "
            f"the trainer needs {later / 2**30:.1f} GiB; try policy.offload=optimizer, a smaller handover.bucket_mib, "
            "more ranks, or set engine.memory_fraction"
        )
    return left
