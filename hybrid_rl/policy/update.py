"""One optimizer step of the policy: on a batch of rollouts by an RL loss, or on demonstrations by cross-entropy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hydra.utils import instantiate
from torch import Tensor

from hybrid_rl.algo.batch import Given, Tokens
from hybrid_rl.algo.kl import ESTIMATORS, Distance, k3, unbiased
from hybrid_rl.algo.mismatch import mismatch_kl
from hybrid_rl.config import AlgoConfig, KlPlace, unbiased_kl
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.numbers import Fault, alone, find, finite
from hybrid_rl.policy.optimizer import Optimizer, StepResult
from hybrid_rl.policy.rows import Accumulated, RowLoss, Update, accumulate, measure
from hybrid_rl.types import PackedBatch, Rollout

# per-token losses [M], and named numbers [M] whose means are reported
Loss = Callable[[Tokens], tuple[Tensor, dict[str, Tensor]]]
LOGPROB, LOG_RATIO, ENTROPY = "log-probability", "log_ratio", "entropy"


@dataclass(slots=True)
class Objective:
    """A token's loss + kl_coef · kl(π, reference), if there is a reference, − entropy_coef · entropy."""

    loss: Loss
    kl: Distance = k3
    kl_unbiased: bool = False  # weighted by ρ
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    @classmethod
    def of(cls, algo: AlgoConfig, kl_coef: float) -> Objective:
        """Return the objective that `algo` names, with this coefficient if the KL belongs to the loss."""
        coef = kl_coef if algo.kl.place == KlPlace.loss else 0.0
        loss = instantiate(algo.loss, _partial_=True)
        return cls(loss, ESTIMATORS[algo.kl.estimator.value], unbiased_kl(algo), coef, algo.entropy_coef)


def update(
    policy: Policy,
    optimizer: Optimizer,
    rollouts: Sequence[Rollout],
    given: Given,
    objective: Objective,
    temperature: float,
) -> Update:
    """Take one optimizer step on the rollouts; the numbers are means over their N sampled tokens.

    `given` weights every token's loss for the whole batch, so the gradient does not depend on how rollouts are split
    into rows, or over ranks. The step is skipped for a non-finite log-probability, loss or gradient. Collective: every
    rank gets the whole batch, and all return the same numbers.
    """
    done = forward_backward(policy, optimizer.scale, rollouts, given, objective, temperature)
    log_ratios = done.columns[LOG_RATIO]
    fault = _fault(done, rollouts)
    if fault and fault.what == LOGPROB:
        fault = alone(fault, lambda r: score(policy, r, temperature), rollouts)
    result = optimizer.skip(fault) if fault else optimizer.step()
    means = {**done.means, "loss": done.means["loss"] * (max(1, len(log_ratios)) / given.divisor)}
    return Update(means | _step_numbers(result), result.fault, log_ratios, done.columns[ENTROPY])


def forward_backward(
    policy: Policy, scale: float, rollouts: Sequence[Rollout], given: Given, objective: Objective, temperature: float
) -> Accumulated:
    """Add the gradient of `scale` times the batch's loss to the parameters'. Collective.

    The columns hold the weighted loss of each token, as LOG_RATIO log π_θ − log π_old, and as ENTROPY the entropy.
    """
    with_entropy = objective.entropy_coef != 0

    def loss(row: PackedBatch) -> RowLoss:
        at = row.token_index
        logprobs, entropy = policy.logprobs(row, temperature, entropy_gradient=with_entropy)
        tokens = given.at(at, logprobs, entropy)
        losses, named = objective.loss(tokens)
        losses = given.corrections[at] * losses
        if given.ref_logprobs is not None:
            reference = given.ref_logprobs[at]
            if objective.kl_coef:
                if objective.kl_unbiased:
                    distance = unbiased(objective.kl, logprobs, reference, tokens.old_logprobs)
                else:
                    distance = objective.kl(logprobs, reference)
                losses = losses + objective.kl_coef * distance
            named = named | {"reference_kl": k3(logprobs.detach(), reference)}
        if with_entropy:
            losses = losses - objective.entropy_coef * entropy
        mismatch = mismatch_kl(logprobs.detach(), tokens.behaviour_logprobs)
        return RowLoss(
            given.weights[at] * losses,
            {LOG_RATIO: logprobs.detach() - tokens.old_logprobs, ENTROPY: entropy},
            {"entropy": entropy, "mismatch_kl": mismatch} | named,
        )

    return accumulate(policy, rollouts, loss, scale / given.divisor)


def _fault(done: Accumulated, rollouts: Sequence[Rollout]) -> Fault | None:
    """Return the first non-finite log-probability or loss, or None; the same on every rank."""
    if math.isfinite(done.means["loss"]) and finite([done.columns[LOG_RATIO]]):
        return None
    found = find({LOGPROB: done.columns[LOG_RATIO], "loss": done.losses}, rollouts)
    return found or Fault("sum of losses", done.means["loss"])


def score(policy: Policy, rollouts: Sequence[Rollout], temperature: float) -> Tensor:
    """Return log π of all N sampled tokens, [N] float32, in rollout order, the same on every rank. Collective."""
    return observe(policy, rollouts, temperature)[0]


def observe(policy: Policy, rollouts: Sequence[Rollout], temperature: float) -> tuple[Tensor, Tensor]:
    """Return log π of all N sampled tokens as `score` does, and the entropies in nats, [N] float32 each. Collective."""
    logprobs, entropy = measure(policy, rollouts, lambda row: policy.logprobs(row, temperature), 2)
    return logprobs, entropy


def imitate(policy: Policy, optimizer: Optimizer, demonstrations: Sequence[Rollout], label_smoothing: float) -> Update:
    """Take a supervised step: cross-entropy averaged over all answer tokens of the demonstrations. Collective.

    The step is skipped for a non-finite loss or gradient.
    """
    losses = demonstrate(policy, optimizer.scale, demonstrations, label_smoothing)
    fault = None if finite([losses]) else find({"loss": losses}, demonstrations)
    if fault:
        fault = alone(fault, lambda r: score(policy, r, 1.0), demonstrations)
    result = optimizer.skip(fault) if fault else optimizer.step()
    numbers = {"loss": float(losses.mean()), "tokens": float(len(losses))}
    return Update(numbers | _step_numbers(result), result.fault)


def demonstrate(policy: Policy, scale: float, demonstrations: Sequence[Rollout], label_smoothing: float) -> Tensor:
    """Add the gradient of `scale` times the mean loss. Return the loss of each answer token, [N]. Collective."""
    count = sum(rollout.sampled for rollout in demonstrations)
    loss = lambda row: RowLoss(policy.cross_entropy(row, label_smoothing))  # noqa: E731
    return accumulate(policy, demonstrations, loss, scale / count).losses


def _step_numbers(result: StepResult) -> dict[str, float]:
    return {"grad_norm": result.grad_norm, "lr": result.lr, "skipped": float(result.skipped)}


def mean_numbers(results: Sequence[dict[str, float]]) -> dict[str, float]:
    """Average each number over the updates that have it; the mismatch is the first update's, skipped steps a count."""
    names = dict.fromkeys(name for result in results for name in result)
    means = {name: statistics.fmean(r[name] for r in results if name in r) for name in names}
    if "mismatch_kl" in means:
        means["mismatch_kl"] = next(r["mismatch_kl"] for r in results if "mismatch_kl" in r)
        means["clip_fraction"] = sum(means.get(name, 0.0) for name in ("clip_low", "clip_high"))
    if "skipped" in means:
        means["skipped"] = sum(r.get("skipped", 0.0) for r in results)
    return means
