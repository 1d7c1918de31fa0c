"""Cumulative sums whose order is fixed, on a GPU too."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256  # entries that one matrix product sums


def cumsum(values: Tensor, rising: bool = False) -> Tensor:
    """Return cumulative sums along the last dimension of `values`, [N] or [n, V], in its dtype.

    CUDA's cumsum has no fixed order of summation and raises in deterministic mode; matrix products replace it there.
    Pass `rising` if no value is negative: no sum is then smaller than the one before, even by rounding.
    """
    if values.device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
        sums = cumsum_by_products(values)
        return sums.cummax(-1).values if rising else sums
    return values.cumsum(-1)


def cumsum_by_products(values: Tensor) -> Tensor:
    """Return cumulative sums along the last dimension by products with triangular matrices, whose order is fixed."""
    count = values.shape[-1]
    blocks = torch.nn.functional.pad(values, (0, -count % BLOCK)).unflatten(-1, (-1, BLOCK))
    within = blocks @ values.new_ones(BLOCK, BLOCK).triu()
    totals = within[..., -1]
    before = (totals[..., None, :] @ values.new_ones(totals.shape[-1], totals.shape[-1]).triu(1)).squeeze(-2)
    return (within + before[..., None]).flatten(-2)[..., :count]
