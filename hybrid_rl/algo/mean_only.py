from torch import Tensor

from hybrid_rl.algo.batch import Scored
from hybrid_rl.algo.grpo import relative

NEEDS = ("group",)


def advantages(batch: Scored) -> Tensor:
    """r − μ over each group → [R]: Dr.GRPO's estimator (arXiv 2503.20783), without division by the spread.

    r = [1, 0, 0, 0] gives [0.75, −0.25, −0.25, −0.25]. A single rollout has nothing to be compared with: 0.
    """
    return relative(batch, lambda r: r - r.mean())
