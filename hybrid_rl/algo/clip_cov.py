import torch
from torch import Tensor

from hybrid_rl.algo import ppo_clip
from hybrid_rl.algo.batch import Tokens
from hybrid_rl.algo.kl_cov import covariances

BOUNDS = {"share": (0, 1), "lower": (0, None), "clip_low": (0, None), "clip_high": (0, None)}


def look(
    minibatch: Tokens,
    share: float = 2e-4,
    lower: float = 1.0,
    upper: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """True for `share` of all tokens, one at least, drawn from those with a covariance between the bounds that PPO's
    clip does not silence."""
    _, clipped = ppo_clip.loss(minibatch, clip_low, clip_high, dual_clip=None)
    covariance = covariances(minibatch)
    inside = (
        ((covariance > lower) & (covariance < upper) & ~(clipped["clip_low"] | clipped["clip_high"]))
        .nonzero()
        .squeeze(1)
    )
    drawn = torch.randperm(len(inside))[: max(1, int(share * len(covariance)))]  # the step has seeded the generator
    chosen = torch.zeros_like(covariance, dtype=torch.bool)
    chosen[inside[drawn.to(inside.device)]] = True
    return chosen


def loss(
    tokens: Tokens,
    share: float = 2e-4,
    lower: float = 1.0,
    upper: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped loss, and 0 for a few random tokens with a high covariance of log π_θ and A (Clip-Cov, arXiv
    2505.22617).

    Likely tokens of good answers take most of the entropy; leaving a few out keeps it up. `lower` and `upper` bound
    what each token adds to the covariance, which is in nats times an advantage: with advantages far from 1 they want
    other values.
    """
    assert tokens.look is not None, "clip_cov needs its look"
    losses, statistics = ppo_clip.loss(tokens, clip_low, clip_high, dual_clip=None)
    return torch.where(tokens.look, 0.0, losses), statistics | {"covariant": tokens.look}
