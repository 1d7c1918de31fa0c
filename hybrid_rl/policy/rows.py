"""Run the model over all rows of a batch, with gradients (`accumulate`) and without (`measure`).

A loss or a measure is a function of one row. Whatever the rows are, callers see per-token columns [N] in rollout order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.numbers import Fault
from hybrid_rl.types import PackedBatch, Rollout


@dataclass(slots=True)
class RowLoss:
    """The result of a loss for a row with M sampled tokens, [M] each; backward starts from `losses` alone.

    `columns` are kept for every token; of `averaged`, only the means over all tokens are kept.
    """

    losses: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    averaged: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Accumulated:
    """The result of forward and backward over all rows, the same on every rank.

    `losses` and `columns` [N] float32, in rollout order; `means` over the N tokens, "loss" among them.
    """

    losses: Tensor
    columns: dict[str, Tensor]
    means: dict[str, float]


@dataclass(frozen=True, slots=True)
class Update:
    """The result of an optimizer step: its numbers by name, and the non-finite number for which it was skipped, if any.

    `log_ratios` and `entropies` [N] float32: log π_θ − log π_old of each sampled token, and the entropy of the policy's
    distribution in nats, before the step; None for a loss without a ratio.
    """

    numbers: dict[str, float]
    fault: Fault | None
    log_ratios: Tensor | None = None
    entropies: Tensor | None = None


def accumulate(
    model: Policy, rollouts: Sequence[Rollout], loss: Callable[[PackedBatch], RowLoss], scale: float
) -> Accumulated:
    """Run forward and backward over all rows, adding the gradient of `scale` · Σ losses to the parameters'.

    Collective: every rank gets the whole batch and computes its own rows.
    """
    count = sum(rollout.sampled for rollout in rollouts)
    columns: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    for row in model.rows(rollouts):
        found = loss(row)
        (found.losses.sum() * scale).backward()
        for name, column in {"loss": found.losses, **found.columns}.items():
            whole = columns.setdefault(name, torch.zeros(count, device=model.device))
            whole[row.token_index] = column.detach()
        for name, column in {"loss": found.losses, **found.averaged}.items():
            sums[name] = sums.get(name, 0) + column.detach().sum().float()
    losses, *others = model.ranks.sum(torch.stack(list(columns.values())))
    means = (model.ranks.sum(torch.stack(list(sums.values()))) / max(1, count)).tolist()
    return Accumulated(losses, dict(zip(list(columns)[1:], others, strict=True)), dict(zip(sums, means, strict=True)))


@torch.no_grad()
def measure(
    model: Policy, rollouts: Sequence[Rollout], measured: Callable[[PackedBatch], Sequence[Tensor]], columns: int
) -> Tensor:
    """Return `columns` numbers of each of the batch's N sampled tokens, [columns, N] float32, the same on every rank.

    `measured` returns them for a row's M tokens, [M] each. Collective.
    """
    found = torch.zeros(columns, sum(rollout.sampled for rollout in rollouts), device=model.device)
    for row in model.rows(rollouts):
        found[:, row.token_index] = torch.stack(tuple(measured(row)))
    model.reshard()  # after a forward without a backward, FSDP keeps embeddings and head whole
    return model.ranks.sum(found)


def as_on_main(model: Policy, *columns: Tensor | None) -> Sequence[Any]:
    """Return rank 0's columns on every rank. Collective.

    A GPU's sums have no fixed order, and ranks that kept different rollouts would wait for each other forever.
    """
    if model.ranks.world == 1:
        return columns
    same = model.ranks.from_main(lambda: [None if column is None else column.cpu() for column in columns])
    return [None if column is None else column.to(model.device) for column in same]
