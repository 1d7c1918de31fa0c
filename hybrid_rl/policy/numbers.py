"""Find non-finite numbers where they appear, and name them by sample; a healthy batch costs one synchronization."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.sharding import local
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.types import Rollout

GRADIENT = "gradient"


@dataclass(frozen=True, slots=True)
class Fault:
    """The first non-finite number; `position` is its token's in the rollout's `token_ids`, prompt included."""

    what: str  # "advantage", "log-probability", "gradient of model.norm.weight", …
    value: float = math.nan
    task_id: str | None = None  # None: it belongs to no single sample
    group_id: int | None = None
    index: int | None = None
    position: int | None = None  # None: it belongs to the whole rollout

    def __str__(self) -> str:
        if self.task_id is None:
            return f"{self.what} is {self.value}"
        token = "" if self.position is None else f", token {self.position}"
        return f"{self.what} is {self.value} at task {self.task_id}, group {self.group_id}, rollout {self.index}{token}"


def finite(columns: Iterable[Tensor]) -> bool:
    """Return whether every number of every column is finite, with one synchronization of the device."""
    return bool(torch.stack([column.isfinite().all() for column in columns]).all())


def find(columns: Mapping[str, Tensor], rollouts: Sequence[Rollout]) -> Fault | None:
    """Return the first non-finite number, column by column; columns are [R] (rollouts) or [N] (sampled tokens)."""
    tokens = sum(r.sampled for r in rollouts)
    for what, column in columns.items():
        first = (~column.isfinite()).nonzero()[:1].flatten().tolist()
        if not first:
            continue
        value = float(column[first[0]])
        if len(column) == len(rollouts) != tokens:
            return _at(what, value, rollouts[first[0]])
        return _at_token(what, value, rollouts, first[0])
    return None


def alone(fault: Fault, compute: Callable[[list[Rollout]], Tensor], rollouts: Sequence[Rollout]) -> Fault:
    """Return the fault of the first sample that shows it when computed alone; the given fault if none does.

    Within a row a NaN also reaches other samples, through attention's products with 0. Collective if `compute` is.
    """
    for rollout in rollouts:
        if own := find({fault.what: compute([rollout])}, [rollout]):
            return own
    return fault


def _at_token(what: str, value: float, rollouts: Sequence[Rollout], token: int) -> Fault:
    for rollout in rollouts:
        if token < rollout.sampled:
            return _at(what, value, rollout, int(rollout.loss_mask.nonzero()[0][token]))
        token -= rollout.sampled
    raise IndexError(f"{what} has more entries than the rollouts have sampled tokens")


def _at(what: str, value: float, r: Rollout, position: int | None = None) -> Fault:
    return Fault(what, value, r.task_id, r.group_id, r.index, position)


def agreed(ranks: Ranks, fault: Fault) -> Fault:
    """Return one fault for all ranks: that of the first rank whose rows name the parameter. Collective."""
    faults = ranks.all_gather(fault)
    return next((f for f in faults if f.what != GRADIENT), faults[0])


@torch.no_grad()
def broken_weight(policy: Policy) -> str | None:
    """Return the name of a non-finite weight, or None; the same on every rank. Collective."""
    rows = [local(p) for p in policy.parameters.values()]
    sums = torch.stack([r.sum(dtype=torch.float32) for r in rows])  # cheap, and non-finite if any weight is
    broken = (~sums.isfinite().all()).float()
    if not float(policy.ranks.sum(broken)):
        return None
    own = next((name for name, r in zip(policy.parameters, rows, strict=True) if not bool(r.isfinite().all())), None)
    return next((name for name in policy.ranks.all_gather(own) if name), None)  # None: only a sum overflowed
