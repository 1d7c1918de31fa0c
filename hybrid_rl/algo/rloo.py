from torch import Tensor

from hybrid_rl.algo.batch import Scored
from hybrid_rl.algo.grpo import relative

NEEDS = ("group",)


def advantages(batch: Scored) -> Tensor:
    """r − the mean of the *other* rollouts of the group = (r − μ)·G / (G − 1) → [R] (RLOO, arXiv 2402.14740).

    r = [1, 0, 0, 0] gives [1, −1/3, −1/3, −1/3]. A single rollout has no others: 0.
    """
    return relative(batch, lambda r: (r - r.mean()) * (len(r) / (len(r) - 1)))
