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
    """Return True for `share` of all tokens, at least one, drawn at random.

    They are drawn from the tokens whose covariance lies between the bounds and which PPO's clip does not silence.
    """
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

    Likely tokens of good answers lower the entropy most; leaving a few of them out preserves it. `lower` and `upper`
    bound what a token adds to the covariance, in nats times an advantage: choose other values for advantages far from
    1.
    """
    assert tokens.look is not None, "clip_cov needs its look"
    losses, statistics = ppo_clip.loss(tokens, clip_low, clip_high, dual_clip=None)
    return torch.where(tokens.look, 0.0, losses), statistics | {"covariant": tokens.look}
