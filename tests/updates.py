"""An update as most tests want it: one advantage a rollout, the token mean over the batch, the engine's log-probabilities as the old ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_rl.algo.aggregation import token_mean
from hybrid_rl.algo.batch import Given
from hybrid_rl.policy import update as module
from hybrid_rl.policy.layout import Layout, sampled_tokens
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.optimizer import Optimizer
from hybrid_rl.types import Rollout


def given(rollouts: Sequence[Rollout], advantages: Sequence[float], reference_logprobs: Tensor | None = None) -> Given:
    tokens = sampled_tokens(rollouts)
    weights, divisor = token_mean(torch.ones(len(tokens), dtype=torch.bool), tokens.rollout_index, max_tokens=128)
    advantage = torch.tensor(advantages, dtype=torch.float32)[tokens.rollout_index]
    old = tokens.behaviour_logprobs
    return Given(advantage, old, old, tokens.rollout_index, torch.ones_like(old), weights, divisor, reference_logprobs)


def update(
    policy: Policy, optimizer: Optimizer, rollouts: Sequence[Rollout], advantages: Sequence[float], loss: module.Loss,
    temperature: float, layout: Layout, row_tokens: int, reference_logprobs: Tensor | None = None, kl_coef: float = 0.0,
) -> dict[str, float]:  # fmt: skip
    """The update's statistics, with the clip fractions of both sides added up."""
    objective = module.Objective(loss, kl_coef=kl_coef)
    facts = given(rollouts, advantages, reference_logprobs)
    statistics, _ = module.update(policy, optimizer, rollouts, facts, objective, temperature, layout, row_tokens)
    return statistics | {"clip_fraction": statistics["clip_low"] + statistics["clip_high"]}
