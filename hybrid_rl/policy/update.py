"""One training step on a batch: gradients over all rows, clip, one AdamW step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybrid_rl.algo.mismatch import mismatch_kl
from hybrid_rl.policy.layout import Layout, pack, sampled_tokens
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.optimizer import Optimizer
from hybrid_rl.types import Rollout

# (logprobs, old_logprobs, advantages), [M] each → per-token loss [M] and which tokens were clipped [M]
Loss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def update(
    policy: Policy, optimizer: Optimizer, rollouts: Sequence[Rollout], advantages: Sequence[float], loss_fn: Loss,
    temperature: float, layout: Layout, row_tokens: int,
) -> dict[str, float]:  # fmt: skip
    """Policy-gradient step; `advantages` has one number a rollout, given to each of its sampled tokens.

    The loss is the token mean: summed over every sampled token of the batch, divided by their number N in the whole
    batch. So the gradient does not depend on how rollouts are split into rows. The old log-probabilities are the
    engine's, as recorded at sampling.
    """
    tokens = sampled_tokens(rollouts, policy.device)
    advantage = torch.tensor(advantages, dtype=torch.float32, device=policy.device)[tokens.rollout_index]
    current = torch.zeros(len(tokens), device=policy.device)
    entropy, clipped, loss_sum = (torch.zeros((), device=policy.device) for _ in range(3))
    for row in pack(rollouts, layout, row_tokens):
        row = row.to(policy.device)
        logprobs, token_entropy = policy.logprobs(row, temperature)
        losses, was_clipped = loss_fn(logprobs, tokens.behaviour_logprobs[row.token_index], advantage[row.token_index])
        (losses.sum() / max(1, len(tokens))).backward()
        current[row.token_index] = logprobs.detach()
        loss_sum += losses.detach().sum()
        entropy += token_entropy.sum()
        clipped += was_clipped.sum()
    result = optimizer.step()
    count = max(1, len(tokens))
    return {
        "loss": loss_sum.item() / count,
        "entropy": entropy.item() / count,
        "mismatch_kl": mismatch_kl(current, tokens.behaviour_logprobs).sum().item() / count,
        "clip_fraction": clipped.item() / count,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "skipped": float(result.skipped),
    }


def imitate(
    policy: Policy, optimizer: Optimizer, demonstrations: Sequence[Rollout], label_smoothing: float, layout: Layout, row_tokens: int
) -> dict[str, float]:  # fmt: skip
    """Supervised step: cross-entropy averaged over all answer tokens of the demonstrations."""
    count = sum(rollout.sampled for rollout in demonstrations)
    loss = 0.0
    for row in pack(demonstrations, layout, row_tokens):
        row_loss = policy.cross_entropy(row.to(policy.device), label_smoothing).sum() / count
        row_loss.backward()
        loss += row_loss.item()
    result = optimizer.step()
    return {"loss": loss, "grad_norm": result.grad_norm, "lr": result.lr, "tokens": float(count), "skipped": float(result.skipped)}
