"""How the losses of a batch's tokens become one number: Σ weight · loss / divisor.

Weights and divisor are of the whole minibatch, so neither rows nor ranks change them. A token that is not kept weighs
nothing. Masks change the divisor of `token_mean` alone: the other two count every rollout of the minibatch, also those
without a kept token.
"""

import torch
from torch import Tensor


def token_mean(kept: Tensor, rollout: Tensor, max_tokens: int) -> tuple[Tensor, float]:
    """Mean over kept tokens (DAPO, arXiv 2503.14476, eq. 8): every token weighs the same, a long rollout more than a
    short one.

    kept [N] bool, rollout [N] int64: the rollout each token is of → weights [N] float32 and what their sum is divided
    by: 1 if none is kept.
    """
    return kept.float(), float(max(1, int(kept.sum())))


def seq_mean(kept: Tensor, rollout: Tensor, max_tokens: int) -> tuple[Tensor, float]:
    """Mean over rollouts of the mean over a rollout's kept tokens (GRPO, arXiv 2402.03300, eq. 3): every rollout weighs
    the same.

    The mean of a rollout without a kept token is 0, and counts.
    """
    _, inverse, counts = rollout[kept].unique(return_inverse=True, return_counts=True)
    weights = torch.zeros(len(kept), device=kept.device)
    weights[kept] = 1 / counts[inverse].float()
    return weights, float(max(1, len(rollout.unique())))


def fixed(kept: Tensor, rollout: Tensor, max_tokens: int) -> tuple[Tensor, float]:
    """Sum over kept tokens / (B · max_tokens), B the rollouts of the minibatch (Dr.GRPO, arXiv 2503.20783).

    Unlike both means, it does not make a token's weight depend on how long its rollout, or the others of the batch,
    came out.
    """
    return kept.float(), float(max(1, len(rollout.unique()) * max_tokens))
