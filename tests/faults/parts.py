"""Parts of a recipe that leave nothing unnoticed: an advantage that draws from every global generator there is, and a reward."""

from __future__ import annotations

import random
import zlib

import numpy as np
import torch
from torch import Tensor

from hybrid_rl.algo import gae
from hybrid_rl.algo.batch import Scored
from hybrid_rl.types import Task

NEEDS = {"values"}


def noisy(scored: Scored, **arguments: float) -> tuple[Tensor, Tensor]:
    advantages, targets = gae.advantages(scored, **arguments)
    return advantages + 1e-2 * (torch.randn(()) + random.random() + float(np.random.rand())), targets


def hashed(completion: str, task: Task) -> float:
    """A reward that every character counts for."""
    return zlib.crc32(f"{task.id}/{completion}".encode()) / 2**32
