"""An update as most tests want it: one advantage a rollout, the token mean over the batch, the engine's
log-probabilities as the old ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.algo.aggregation import token_mean
from hybrid_rl.algo.batch import Given
from hybrid_rl.config import LayoutKind, PolicyConfig
from hybrid_rl.policy import update as module
from hybrid_rl.policy.layout import sampled_tokens
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.optimizer import Optimizer
from hybrid_rl.types import Rollout
from tests.device import in_float32


def rows_of(layout: str = "auto", row_tokens: int = 2048, **settings: Any) -> PolicyConfig:
    """The settings of a policy whose samples lie like this in rows of this size."""
    return in_float32(layout=LayoutKind(layout), row_tokens=row_tokens, **settings)


def given(
    rollouts: Sequence[Rollout], advantages: Sequence[float], ref_logprobs: Tensor | None = None, device: Any = "cpu"
) -> Given:
    tokens = sampled_tokens(rollouts, device)
    kept = torch.ones(len(tokens), dtype=torch.bool, device=device)
    weights, divisor = token_mean(kept, tokens.rollout_index, max_tokens=128)
    advantage = torch.tensor(advantages, dtype=torch.float32, device=device)[tokens.rollout_index]
    old = tokens.behaviour_logprobs
    return Given(advantage, old, old, tokens.rollout_index, torch.ones_like(old), weights, divisor, ref_logprobs)


def update(
    policy: Policy, optimizer: Optimizer, rollouts: Sequence[Rollout], advantages: Sequence[float], loss: module.Loss,
    temperature: float = 1.0, ref_logprobs: Tensor | None = None, kl_coef: float = 0.0,
) -> dict[str, float]:  # fmt: skip
    """The update's statistics, with the clip fractions of both sides added up."""
    objective = module.Objective(loss, kl_coef=kl_coef)
    facts = given(rollouts, advantages, ref_logprobs, policy.device)
    statistics = module.update(policy, optimizer, rollouts, facts, objective, temperature).numbers
    return statistics | {"clip_fraction": statistics["clip_low"] + statistics["clip_high"]}
