from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from hybrid_rl.algo.batch import Scored
from hybrid_rl.algo.ratio import log_ratio


def refuses(own: dict[str, Any], run: Any) -> Iterator[tuple[str, str]]:
    if not 0 <= own["low"] <= own["high"]:
        yield "low", f"must be from 0 to high = {own['high']:g}"


def correct(
    batch: Scored, low: float = 0.99, high: float = 1.01, level: Literal["geometric", "product"] = "geometric"
) -> tuple[Tensor, Tensor]:
    """Drop the rollouts whose geometric mean of w leaves [low, high]; w = π_old / μ of trainer and engine, token by
    token.

    Why geometric: a product grows with the rollout's length. A mean difference of 0.012 nats, two engines' rounding, is
    a product of e^1.2 = 3.3 after 100 tokens (huggingface/trl#4772) and e^120 after 10,000, so a band for products
    drops long answers, not bad ones; the geometric mean is e^0.012 at any length. `level="product"` suits short ones:
    0.5 and 2 are usual. It only masks: weights are 1; another correction (tis) may set them. A NaN is dropped.
    """
    log_weights = log_ratio(batch.old_logprobs, batch.behaviour_logprobs)
    if level not in ("geometric", "product"):
        raise ValueError(f"seq_mask: level={level!r} is neither 'geometric' nor 'product'")
    of_rollout = (batch.mean_of_rollout if level == "geometric" else batch.sum_of_rollout)(log_weights).exp()
    return torch.ones_like(log_weights), batch.to_tokens((of_rollout >= low) & (of_rollout <= high))
