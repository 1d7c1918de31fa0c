from collections.abc import Callable

import torch
from torch import Tensor

from hybrid_rl.algo.batch import Scored

NEEDS = ("group",)
BOUNDS = {"eps": (0, None)}


def advantages(batch: Scored, eps: float = 1e-6) -> Tensor:
    """(r − μ) / (σ + eps) over each group → [R], σ with ddof 1 (DeepSeekMath, arXiv 2402.03300, eq. 3).

    r = [1, 0, 0, 0] gives [1.5, −0.5, −0.5, −0.5]. Equal rewards, or one rollout, give 0 instead of noise over eps.
    """
    return relative(batch, lambda r: (r - r.mean()) / (r.std(correction=1) + eps))


def relative(batch: Scored, estimate: Callable[..., Tensor], *columns: Tensor) -> Tensor:
    """Return `estimate(rewards [G], *columns [G]) → [G]` of every group, [R]; 0 for one rollout or equal rewards."""
    return batch.per_group(lambda r, *own: torch.zeros_like(r) if is_constant(r) else estimate(r, *own), *columns)


def is_constant(values: Tensor) -> bool:
    """Return whether the values are equal up to rounding, as sums of the same parts in another order are."""
    return bool(values.max() - values.min() <= rounding(values))


def rounding(values: Tensor) -> Tensor:
    """Return a bound on rounding errors of numbers of this size: a few units in the last place of the largest."""
    return 4 * torch.finfo(values.dtype).eps * values.abs().max()
