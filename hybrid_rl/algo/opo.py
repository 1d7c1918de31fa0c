from torch import Tensor

from hybrid_rl.algo.batch import Scored
from hybrid_rl.algo.grpo import relative

NEEDS = ("group",)


def advantages(batch: Scored) -> Tensor:
    """r − Σ len·r / Σ len over each group → [R] (OPO, arXiv 2505.23585): least variance if a gradient's square grows
    with length.

    r = [1, 0, 0, 0] of 3, 1, 2, 2 tokens gives [0.625, −0.375, −0.375, −0.375]; of equal lengths it is mean_only. One
    rollout: 0.
    """
    return relative(
        batch, lambda r, length: r - (length * r).sum() / length.sum(), batch.lengths.to(batch.outcomes.dtype)
    )
