"""Parts of an algorithm that give what is not finite, for one rollout and some of its tokens; loaded by name."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rl.algo.batch import Scored, Tokens


def advantages(batch: Scored, rollout: int, value: str = "nan", token: int = 0) -> Tensor:
    """Reward minus the mean over all, but for one token."""
    found = batch.to_tokens(batch.rewards - batch.rewards.mean())
    found[(batch.rollout == rollout).nonzero()[token]] = float(value)
    return found


def loss(tokens: Tokens, rollout: int, value: str = "nan") -> tuple[Tensor, dict[str, Tensor]]:
    """−A log π, and at the last token of one rollout something else."""
    losses = -tokens.advantages * tokens.logprobs
    place = (tokens.rollout == rollout).nonzero()[-1:]
    return losses.index_add(0, place[:, 0], torch.full((len(place),), float(value))), {}


def steep(tokens: Tokens, rollout: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Finite everywhere, but without a finite derivative at one rollout's tokens: √|x − x|."""
    losses, own = -tokens.advantages * tokens.logprobs, (tokens.rollout == rollout).nonzero()[:, 0]
    there = tokens.logprobs[own]
    return losses.index_add(0, own, (there - there.detach()).abs().sqrt()), {}


def correct(batch: Scored, rollout: int) -> tuple[Tensor, Tensor]:
    weights = torch.ones_like(batch.old_logprobs)
    weights[(batch.rollout == rollout).nonzero()[0]] = float("inf")
    return weights, torch.ones_like(weights, dtype=torch.bool)
