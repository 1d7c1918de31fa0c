import torch
from torch import Tensor

from hybrid_rl.algo.batch import Tokens
from hybrid_rl.algo.ratio import log_ratio

BOUNDS = {"share": (0, 1), "coef": (0, None)}


def look(minibatch: Tokens, share: float = 2e-4, coef: float = 1.0) -> Tensor:
    """Return True for the `share` of the tokens, at least one, with the highest positive covariance.

    Tokens of equal covariance are all chosen or none.
    """
    covariance = covariances(minibatch)
    count = max(1, int(share * len(covariance)))
    return (covariance >= covariance.topk(count).values[-1]) & (covariance > 0)


def loss(tokens: Tokens, share: float = 2e-4, coef: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """−ρA, and coef · |log ρ| on top for the tokens with the highest covariance of log π_θ and A (KL-Cov, arXiv
    2505.22617).

    Likely tokens of good answers lower the entropy most; the penalty holds those few back and clips none. At ρ = 1 it
    has no gradient: it acts from a batch's second update on.
    """
    assert tokens.look is not None, "kl_cov needs its look"
    moved = log_ratio(tokens.logprobs, tokens.old_logprobs)
    never = torch.zeros_like(tokens.look, dtype=torch.bool)
    losses = -moved.exp() * tokens.advantages + coef * tokens.look * moved.abs()
    return losses, {"clip_low": never, "clip_high": never, "covariant": tokens.look}


def covariances(minibatch: Tokens) -> Tensor:
    """(log π_θ − mean) · (A − mean) at each token, means over the minibatch, [N]: what the token adds to their
    covariance."""
    logprobs, advantages = minibatch.logprobs, minibatch.advantages
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())
