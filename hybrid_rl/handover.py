"""Policy to engine: the new weights reach the engine and its version moves on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hybrid_rl.engine.base import KV_CACHE, WEIGHTS, Engine
from hybrid_rl.policy.model import Policy


class HandoverError(RuntimeError):
    """The engine's weights are not the policy's."""


def hand_over(policy: Policy, engine: Engine, version: int, *, verify: bool = False, bucket_bytes: int = 512 * 2**20) -> int:
    """Wake the engine's weights, bring the policy's in, then wake the KV cache; returns the bytes moved.

    An engine that samples from the policy's own memory has nothing to move: a handover is a new version. `verify`
    compares name by name afterwards and raises HandoverError for the first weight that differs.
    """
    engine.wake([WEIGHTS])
    weights = policy.model.state_dict()
    moved = 0
    if engine.shares(weights):
        engine.set_version(version)
    else:
        moved = sum(tensor.nbytes for tensor in weights.values())
        engine.update_weights(buckets(weights, bucket_bytes), version)
    if verify:
        theirs = engine.weights()
        for name, tensor in weights.items():
            if name not in theirs or not torch.equal(theirs[name].to(tensor.device), tensor.to(theirs[name].dtype)):
                raise HandoverError(f"after the handover of version {version} the engine's {name} differs from the policy's")
    engine.wake([KV_CACHE])
    return moved


def buckets(weights: dict[str, Tensor], size: int) -> Iterator[dict[str, Tensor]]:
    """The weights in order, in buckets of about `size` bytes: at least one weight each, and no weight split."""
    bucket: dict[str, Tensor] = {}
    held = 0
    for name, tensor in weights.items():
        if bucket and held + tensor.nbytes > size:
            yield bucket
            bucket, held = {}, 0
        bucket[name] = tensor
        held += tensor.nbytes
    if bucket:
        yield bucket
