"""An advantage that draws from every global generator there is, as a recipe's own part may."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from hybrid_rl.algo import gae
from hybrid_rl.algo.batch import Scored

NEEDS = {"values"}


def noisy(scored: Scored, **arguments: float) -> tuple[Tensor, Tensor]:
    advantages, targets = gae.advantages(scored, **arguments)
    return advantages + 1e-2 * (torch.randn(()) + random.random() + float(np.random.rand())), targets
