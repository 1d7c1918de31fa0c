"""Parts that sleep for ever on one rank; loaded by name."""

from __future__ import annotations

import os
import time

from torch import Tensor

from hybrid_rl.algo.batch import Tokens
from hybrid_rl.algo.ppo_clip import loss as ppo_loss

calls = 0


def sleeps_in_the_loss() -> None:
    time.sleep(1000)


def loss(tokens: Tokens, rank: int, after: int = 2, **arguments: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Sleep from the call after so many on, on one rank."""
    global calls
    calls += 1
    if calls > after and int(os.environ.get("RANK", "0")) == rank:
        sleeps_in_the_loss()
    return ppo_loss(tokens, **arguments)
