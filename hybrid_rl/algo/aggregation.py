"""Aggregate the losses of a minibatch's tokens into one number: Σ weight · loss / divisor.

Weights and divisor are computed from the whole minibatch, so they do not depend on rows or ranks. A token that is not
kept has weight 0. Masks change only the divisor of `token_mean`: the other two count every rollout of the minibatch,
also those without a kept token.
"""

import torch
from torch import Tensor


def token_mean(kept: Tensor, rollout: Tensor, max_tokens: int) -> tuple[Tensor, float]:
    """Return weights [N] float32 and the divisor of the mean over kept tokens (DAPO, arXiv 2503.14476, eq. 8).

    Every token weighs the same, so a long rollout weighs more than a short one. `kept` [N] bool; `rollout` [N] int64 is
    the number of each token's rollout. The divisor is the number of kept tokens, 1 if none is kept.
    """
    return kept.float(), float(max(1, int(kept.sum())))


def seq_mean(kept: Tensor, rollout: Tensor, max_tokens: int) -> tuple[Tensor, float]:
    """Return weights and divisor of the mean over rollouts of each rollout's mean (GRPO, arXiv 2402.03300, eq. 3).

    Every rollout weighs the same. The mean of a rollout without a kept token is 0, and counts.
    """
    _, inverse, counts = rollout[kept].unique(return_inverse=True, return_counts=True)
    weights = torch.zeros(len(kept), device=kept.device)
    weights[kept] = 1 / counts[inverse].float()
    return weights, float(max(1, len(rollout.unique())))


def fixed(kept: Tensor, rollout: Tensor, max_tokens: int) -> tuple[Tensor, float]:
    """Return weights and divisor of Σ over kept tokens / (B · max_tokens), with B rollouts (Dr.GRPO, arXiv 2503.20783).

    Unlike in both means, a token's weight does not depend on the length of any rollout.
    """
    return kept.float(), float(max(1, len(rollout.unique()) * max_tokens))
