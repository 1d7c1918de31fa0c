import torch
from torch import Tensor

from hybrid_rl.algo.batch import Scored
from hybrid_rl.algo.grpo import relative, rounding

NEEDS = ("group",)


def advantages(batch: Scored) -> Tensor:
    """(r − μ) / μ over each group → [R]: log-likelihood of success instead of its rate (MaxRL, arXiv 2602.02710).

    r = [1, 0, 0, 0] gives [3, −1, −1, −1]. Meant for rewards that are never negative: a group with μ ≤ 0 gets 0.
    """
    return relative(batch, _over_mean)


def _over_mean(rewards: Tensor) -> Tensor:
    mean = rewards.mean()
    # not `mean > 0`: rewards of both signs that cancel leave a mean of rounding, and that is no divisor
    return (rewards - mean) / mean if mean > rounding(rewards) else torch.zeros_like(rewards)
