"""deterministic=true: the same bits on every run with the same settings, on the same machine and number of ranks."""

from __future__ import annotations

import os
import random

import numpy as np
import torch
from torch import Tensor

BLOCK = 256  # entries that one product sums up


def make_deterministic(seed: int) -> None:
    """Before anything is computed or another process started: operations without a deterministic form raise from now on.

    Child processes, the reward's workers among them, order sets and dicts of text alike from run to run.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # or cuBLAS picks how it sums by what is free
    os.environ["PYTHONHASHSEED"] = str(seed % 2**32)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a check that costs a pass over memory
    torch.backends.cudnn.benchmark = False
    random.seed(seed)
    np.random.seed(seed % 2**32)


def seed_all(number: int) -> None:
    """Seed the generators of Python, NumPy and torch. A step does, with a number that follows from the run's seed and the step: what a recipe
    draws in it is the same on every rank, and a resumed run draws it again without any generator's state."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def cumsum(values: Tensor, rising: bool = False) -> Tensor:
    """Running sums along the last dimension of [N] or [n, V]. CUDA's own are in no fixed order, and refused where that matters: then by products.

    `rising`: no value is negative, and no sum may be smaller than the one before, by rounding either.
    """
    if values.device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
        sums = cumsum_by_products(values)
        return sums.cummax(-1).values if rising else sums
    return values.cumsum(-1)


def cumsum_by_products(values: Tensor) -> Tensor:
    """Within blocks, then over blocks: two products with triangles of ones, whose order is fixed."""
    count = values.shape[-1]
    blocks = torch.nn.functional.pad(values, (0, -count % BLOCK)).unflatten(-1, (-1, BLOCK))
    within = blocks @ values.new_ones(BLOCK, BLOCK).triu()
    totals = within[..., -1]
    before = (totals[..., None, :] @ values.new_ones(totals.shape[-1], totals.shape[-1]).triu(1)).squeeze(-2)
    return (within + before[..., None]).flatten(-2)[..., :count]
