"""One training step on a batch: gradients over all rows of all ranks, clip, one AdamW step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybrid_rl.algo.kl import k3
from hybrid_rl.algo.mismatch import mismatch_kl
from hybrid_rl.policy.layout import Layout, pack, sampled_tokens
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.optimizer import Optimizer
from hybrid_rl.types import Rollout

# (logprobs, old_logprobs, advantages), [M] each → per-token loss [M] and which tokens were clipped [M]
Loss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def update(
    policy: Policy, optimizer: Optimizer, rollouts: Sequence[Rollout], advantages: Sequence[float], loss_fn: Loss,
    temperature: float, layout: Layout, row_tokens: int, reference_logprobs: Tensor | None = None, kl_coef: float = 0.0,
) -> dict[str, float]:  # fmt: skip
    """Policy-gradient step; `advantages` has one number a rollout, given to each of its sampled tokens.

    The loss is the token mean: summed over every sampled token of the batch, divided by their number N in the whole
    batch. So the gradient does not depend on how rollouts are split into rows, or over ranks. The old log-probabilities are
    the engine's, as recorded at sampling. `reference_logprobs` [N], as `score` gives them, add kl_coef · k3 to each token's loss.
    Collective: every rank is given the whole batch, and all return the same numbers.
    """
    tokens = sampled_tokens(rollouts, policy.device)
    count = max(1, len(tokens))
    advantage = torch.tensor(advantages, dtype=torch.float32, device=policy.device)[tokens.rollout_index]
    sums = torch.zeros(5, device=policy.device)
    for row in pack(rollouts, layout, row_tokens, policy.ranks):
        row = row.to(policy.device)
        behaviour = tokens.behaviour_logprobs[row.token_index]
        logprobs, entropy = policy.logprobs(row, temperature)
        losses, clipped = loss_fn(logprobs, behaviour, advantage[row.token_index])
        distance = torch.zeros_like(losses)
        if reference_logprobs is not None:
            distance = k3(logprobs, reference_logprobs[row.token_index])
            if kl_coef:
                losses = losses + kl_coef * distance
        (losses.sum() * (optimizer.scale / count)).backward()
        mismatch = mismatch_kl(logprobs.detach(), behaviour)
        sums += torch.stack([x.detach().sum().float() for x in (losses, entropy, mismatch, clipped, distance)])
    loss, entropy_mean, mismatch_mean, clip_fraction, kl = (policy.ranks.sum(sums) / count).tolist()
    result = optimizer.step()
    return {
        "loss": loss,
        "entropy": entropy_mean,
        "mismatch_kl": mismatch_mean,
        "clip_fraction": clip_fraction,
        **({} if reference_logprobs is None else {"reference_kl": kl}),
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "skipped": float(result.skipped),
    }


@torch.no_grad()
def score(policy: Policy, rollouts: Sequence[Rollout], temperature: float, layout: Layout, row_tokens: int) -> Tensor:
    """log π of all N sampled tokens of the batch, [N] float32, in rollout order; the same on every rank. Collective."""
    tokens = sampled_tokens(rollouts, policy.device)
    logprobs = torch.zeros(len(tokens), device=policy.device)
    for row in pack(rollouts, layout, row_tokens, policy.ranks):
        row = row.to(policy.device)
        logprobs[row.token_index] = policy.logprobs(row, temperature)[0]
    policy.reshard()  # after a forward without a backward, FSDP keeps embeddings and head whole
    return policy.ranks.sum(logprobs)


def imitate(
    policy: Policy, optimizer: Optimizer, demonstrations: Sequence[Rollout], label_smoothing: float, layout: Layout, row_tokens: int
) -> dict[str, float]:  # fmt: skip
    """Supervised step: cross-entropy averaged over all answer tokens of the demonstrations."""
    count = sum(rollout.sampled for rollout in demonstrations)
    loss = torch.zeros((), device=policy.device)
    for row in pack(demonstrations, layout, row_tokens, policy.ranks):
        row_loss = policy.cross_entropy(row.to(policy.device), label_smoothing).sum()
        (row_loss * (optimizer.scale / count)).backward()
        loss += row_loss.detach()
    loss = policy.ranks.sum(loss) / count
    result = optimizer.step()
    return {"loss": float(loss), "grad_norm": result.grad_norm, "lr": result.lr, "tokens": float(count), "skipped": float(result.skipped)}
