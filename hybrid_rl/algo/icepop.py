from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.algo.batch import Scored
from hybrid_rl.algo.ratio import ratio


def refuses(own: dict[str, Any], run: Any) -> Iterator[tuple[str, str]]:
    if not 0 <= own["low"] <= own["high"]:
        yield "low", f"must be from 0 to high = {own['high']:g}"


def correct(batch: Scored, low: float = 0.5, high: float = 5.0) -> tuple[Tensor, Tensor]:
    """w where low ≤ w ≤ high, else 0; w = π_old / μ of trainer and engine, token by token (IcePop in Ring-1T, arXiv
    2510.18855).

    As published, a token of weight 0 stays in the aggregation's count: all are kept, and the more are out of the band
    the smaller the step. Bounds are inclusive.
    """
    weights = ratio(batch.old_logprobs, batch.behaviour_logprobs)
    inside = (weights >= low) & (weights <= high)
    return torch.where(inside, weights, 0.0), torch.ones_like(inside)
