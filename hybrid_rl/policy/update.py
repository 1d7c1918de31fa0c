"""One training step on a batch: gradients over all rows of all ranks, clip, one AdamW step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rl.algo.batch import Given, Tokens
from hybrid_rl.algo.kl import k3
from hybrid_rl.algo.mismatch import mismatch_kl
from hybrid_rl.policy.layout import Layout, pack, sampled_tokens
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.optimizer import Optimizer
from hybrid_rl.types import Rollout

# per-token losses [M], and named numbers [M] whose means are reported
Loss = Callable[[Tokens], tuple[Tensor, dict[str, Tensor]]]
# (logprobs, reference_logprobs) [M] → their distance [M]
Distance = Callable[[Tensor, Tensor], Tensor]


@dataclass(slots=True)
class Objective:
    """The loss of a token and what is added to it: kl_coef · kl(π, reference) where there is a reference, −entropy_coef · entropy."""

    loss: Loss
    kl: Distance = k3
    kl_coef: float = 0.0
    entropy_coef: float = 0.0


def update(
    policy: Policy, optimizer: Optimizer, rollouts: Sequence[Rollout], given: Given, objective: Objective,
    temperature: float, layout: Layout, row_tokens: int,
) -> tuple[dict[str, float], Tensor]:  # fmt: skip
    """One optimizer step on the rollouts; returns its statistics, means over their N sampled tokens, and log π_θ − log π_old [N] before it.

    `given` weights every token's loss for the whole batch, so the gradient does not depend on how rollouts are split into
    rows, or over ranks. Collective: every rank is given the whole batch, and all return the same numbers.
    """
    log_ratios = torch.zeros(len(given.rollout), device=policy.device)
    sums: dict[str, Tensor] = {}
    for row in pack(rollouts, layout, row_tokens, policy.ranks):
        row = row.to(policy.device)
        at = row.token_index
        logprobs, entropy = policy.logprobs(row, temperature, entropy_gradient=objective.entropy_coef != 0)
        tokens = given.at(at, logprobs)
        losses, statistics = objective.loss(tokens)
        losses = given.corrections[at] * losses
        if given.reference_logprobs is not None:
            reference = given.reference_logprobs[at]
            if objective.kl_coef:
                losses = losses + objective.kl_coef * objective.kl(logprobs, reference)
            statistics = statistics | {"reference_kl": k3(logprobs.detach(), reference)}
        if objective.entropy_coef:
            losses = losses - objective.entropy_coef * entropy
        losses = given.weights[at] * losses
        (losses.sum() * (optimizer.scale / given.divisor)).backward()
        log_ratios[at] = logprobs.detach() - tokens.old_logprobs
        mismatch = mismatch_kl(logprobs.detach(), tokens.behaviour_logprobs)
        for name, column in ({"loss": losses, "entropy": entropy, "mismatch_kl": mismatch} | statistics).items():
            sums[name] = sums.get(name, 0) + column.detach().sum().float()
    totals = policy.ranks.sum(torch.stack(list(sums.values())))
    means = dict(zip(sums, (totals / max(1, len(given.rollout))).tolist(), strict=True))
    means["loss"] *= max(1, len(given.rollout)) / given.divisor
    result = optimizer.step()
    numbers = {**means, "grad_norm": result.grad_norm, "lr": result.lr, "skipped": float(result.skipped)}
    return numbers, policy.ranks.sum(log_ratios)


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
