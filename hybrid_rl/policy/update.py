"""One training step on a batch: gradients over all rows of all ranks, clip, one AdamW step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rl.algo.batch import Given, Tokens
from hybrid_rl.algo.kl import Distance, k3, unbiased
from hybrid_rl.algo.mismatch import mismatch_kl
from hybrid_rl.policy.layout import Layout, pack, sampled_tokens
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.numbers import Fault, alone, find, finite
from hybrid_rl.policy.optimizer import Optimizer
from hybrid_rl.processes import hangs
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.types import Rollout

# per-token losses [M], and named numbers [M] whose means are reported
Loss = Callable[[Tokens], tuple[Tensor, dict[str, Tensor]]]
LOGPROB = "log-probability"


@dataclass(slots=True)
class Objective:
    """The loss of a token and what is added to it: kl_coef · kl(π, reference) if there is a reference, −entropy_coef ·
    entropy."""

    loss: Loss
    kl: Distance = k3
    kl_unbiased: bool = False  # weighted by ρ
    kl_coef: float = 0.0
    entropy_coef: float = 0.0


@dataclass(slots=True)
class Pass:
    """What forward and backward over all rows gave: means over the N sampled tokens, and of every token its loss [N],
    as this rank computed it, and log π_θ − log π_old [N]."""

    means: dict[str, float]
    losses: Tensor
    log_ratios: Tensor

    def fault(self, rollouts: Sequence[Rollout], ranks: Ranks) -> Fault | None:
        """The first log-probability or loss that is not finite; None where all are. Collective, and the same on every
        rank."""
        if math.isfinite(self.means["loss"]) and finite([self.log_ratios]):
            return None
        found = find({LOGPROB: self.log_ratios, "loss": ranks.sum(self.losses)}, rollouts)
        return found or Fault("sum of losses", self.means["loss"])


def update(
    policy: Policy, optimizer: Optimizer, rollouts: Sequence[Rollout], given: Given, objective: Objective,
    temperature: float, layout: Layout, row_tokens: int,
) -> tuple[dict[str, float], Tensor]:  # fmt: skip
    """One optimizer step on the rollouts; returns its statistics, means over their N sampled tokens, and log π_θ − log
    π_old [N] before it.

    `given` weights every token's loss for the whole batch, so the gradient does not depend on how rollouts are split
    into rows, or over ranks. Where a log-probability, a loss or the gradient is not finite the step is skipped, and
    `optimizer.fault` names it. Collective: every rank is given the whole batch, and all return the same numbers.
    """
    done = accumulate(policy, optimizer.scale, rollouts, given, objective, temperature, layout, row_tokens)
    fault = done.fault(rollouts, policy.ranks)
    if fault and fault.what == LOGPROB:
        fault = alone(fault, lambda r: score(policy, r, temperature, layout, row_tokens), rollouts)
    result = optimizer.skip(fault) if fault else optimizer.step()
    return {
        **done.means,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "skipped": float(result.skipped),
    }, done.log_ratios


def accumulate(
    policy: Policy, scale: float, rollouts: Sequence[Rollout], given: Given, objective: Objective, temperature: float, layout: Layout,
    row_tokens: int,
) -> Pass:  # fmt: skip
    """Forward and backward over all rows: the gradient of `scale` · loss is added to the parameters'. Collective."""
    count = len(given.rollout)
    token_losses, log_ratios = torch.zeros(2, count, device=policy.device)
    sums: dict[str, Tensor] = {}
    for row in pack(rollouts, layout, row_tokens, policy.ranks):
        row = row.to(policy.device)
        at = row.token_index
        logprobs, entropy = policy.logprobs(row, temperature, entropy_gradient=objective.entropy_coef != 0)
        tokens = given.at(at, logprobs, entropy)
        losses, statistics = objective.loss(tokens)
        losses = given.corrections[at] * losses
        if given.reference_logprobs is not None:
            reference = given.reference_logprobs[at]
            if objective.kl_coef:
                if objective.kl_unbiased:
                    distance = unbiased(objective.kl, logprobs, reference, tokens.old_logprobs)
                else:
                    distance = objective.kl(logprobs, reference)
                losses = losses + objective.kl_coef * distance
            statistics = statistics | {"reference_kl": k3(logprobs.detach(), reference)}
        if objective.entropy_coef:
            losses = losses - objective.entropy_coef * entropy
        losses = given.weights[at] * losses
        (losses.sum() * (scale / given.divisor)).backward()
        token_losses[at] = losses.detach()
        log_ratios[at] = logprobs.detach() - tokens.old_logprobs
        mismatch = mismatch_kl(logprobs.detach(), tokens.behaviour_logprobs)
        for name, column in ({"loss": losses, "entropy": entropy, "mismatch_kl": mismatch} | statistics).items():
            sums[name] = sums.get(name, 0) + column.detach().sum().float()
        hangs.progress()
    totals = policy.ranks.sum(torch.stack(list(sums.values())))
    means = dict(zip(sums, (totals / max(1, count)).tolist(), strict=True))
    means["loss"] *= max(1, count) / given.divisor
    return Pass(means, token_losses, policy.ranks.sum(log_ratios))


def score(policy: Policy, rollouts: Sequence[Rollout], temperature: float, layout: Layout, row_tokens: int) -> Tensor:
    """log π of all N sampled tokens of the batch, [N] float32, in rollout order; the same on every rank. Collective."""
    return observe(policy, rollouts, temperature, layout, row_tokens)[0]


@torch.no_grad()
def observe(
    policy: Policy, rollouts: Sequence[Rollout], temperature: float, layout: Layout, row_tokens: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """log π of all N sampled tokens, and the distributions' entropies, [N] float32 both, in rollout order; the same on
    every rank. Collective."""
    found = torch.zeros(2, len(sampled_tokens(rollouts, policy.device)), device=policy.device)
    for row in pack(rollouts, layout, row_tokens, policy.ranks):
        row = row.to(policy.device)
        found[:, row.token_index] = torch.stack(policy.logprobs(row, temperature))
        hangs.progress()
    policy.reshard()  # after a forward without a backward, FSDP keeps embeddings and head whole
    logprobs, entropy = policy.ranks.sum(found)
    return logprobs, entropy


def imitate(
    policy: Policy, optimizer: Optimizer, demonstrations: Sequence[Rollout], label_smoothing: float, layout: Layout, row_tokens: int
) -> dict[str, float]:  # fmt: skip
    """Supervised step: cross-entropy averaged over all answer tokens of the demonstrations. Skipped, and
    `optimizer.fault` set, where a number is not finite."""
    losses = demonstrate(policy, optimizer.scale, demonstrations, label_smoothing, layout, row_tokens)
    fault = None if finite([losses]) else find({"loss": losses}, demonstrations)
    if fault:
        fault = alone(fault, lambda r: score(policy, r, 1.0, layout, row_tokens), demonstrations)
    result = optimizer.skip(fault) if fault else optimizer.step()
    numbers = {
        "loss": float(losses.mean()),
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "tokens": float(len(losses)),
    }
    return numbers | {"skipped": float(result.skipped)}


def demonstrate(
    policy: Policy, scale: float, demonstrations: Sequence[Rollout], label_smoothing: float, layout: Layout, row_tokens: int
) -> Tensor:  # fmt: skip
    """Forward and backward over all rows; returns the loss of every answer token, [N] float32, the same on every rank.
    Collective."""
    losses = torch.zeros(sum(rollout.sampled for rollout in demonstrations), device=policy.device)
    for row in pack(demonstrations, layout, row_tokens, policy.ranks):
        row = row.to(policy.device)
        of_row = policy.cross_entropy(row, label_smoothing)
        (of_row.sum() * (scale / len(losses))).backward()
        losses[row.token_index] = of_row.detach()
        hangs.progress()
    return policy.ranks.sum(losses)
