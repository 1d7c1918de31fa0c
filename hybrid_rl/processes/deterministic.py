"""Make runs with deterministic=true reproducible to the bit, on the same machine, settings and number of ranks."""

from __future__ import annotations

import os
import random

import numpy as np
import torch


def make_deterministic(seed: int) -> None:
    """Seed and configure Python, NumPy and torch; call it before computing anything or starting another process.

    Afterwards torch operations without a deterministic implementation raise. Child processes, such as reward workers,
    hash text, and so order sets, in the same way in every run.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # otherwise cuBLAS chooses the order of sums by free memory
    os.environ["PYTHONHASHSEED"] = str(seed % 2**32)
    torch.use_deterministic_algorithms(True)
    # filling is a debugging aid that costs a pass over memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    random.seed(seed)
    np.random.seed(seed % 2**32)


def seed_all(number: int) -> None:
    """Seed the generators of Python, NumPy and torch.

    Each step calls it with a number derived from the run's seed and the step: what a recipe draws in the step is then
    the same on every rank and in a resumed run, without saving the state of a generator.
    """
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)
