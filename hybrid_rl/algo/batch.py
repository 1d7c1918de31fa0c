"""What an algorithm's parts are computed from: the numbers of one batch, in rollout order, and no text, model or
layout.

A part is a plain function in a file of its own, chosen by `_target_`; its other arguments are configuration:

    advantages(batch: Scored, …)  → [R], one for each rollout, or [N], one for each sampled token
    correct(batch: Scored, …)     → weights [N], and which tokens are kept [N] bool
    select(minibatch: Tokens, …)  → weights [N] of the tokens' losses; 0 silences a token
    look(minibatch: Tokens, …)    → numbers [N] for `tokens.look`; beside a loss, with the loss's arguments
    loss(tokens: Tokens, …)       → losses [M], and named [M] numbers whose means are reported
    aggregate(kept, rollout, max_tokens, …) → weight [N] of each token's loss, and what their sum is divided by

A loss is called on rows: what it gives a token must not depend on the other rollouts it is called with. `select` and
`look` see the kept tokens of an update's whole minibatch, before its rows, with the policy's log-probabilities and
entropies as they are then. hybrid_rl/algo/contract.py holds parts to all this.

A part's file states what the part needs and what it refuses; both are read from the source before torch loads:

    NEEDS = ("values",)             names from NEEDED in declared.py
    BOUNDS = {"clip_low": (0, 1)}   of arguments, both ends included; None: no end
    def refuses(own, run): …        yields (key, problem) for what else cannot work

`own` are the part's arguments with their defaults, `run` is the whole configuration. `refuses` runs alone: it sees its
two arguments and builtins, and no import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.deterministic import cumsum

# what a person calls the columns that a model computes
RECOMPUTED, REFERENCE, TEACHER, VALUE = (
    "recomputed log-probability",
    "reference's log-probability",
    "teacher's log-probability",
    "value",
)


@dataclass(slots=True)
class Scored:
    """A batch whose rewards are in: R rollouts, neighbours in groups, with N sampled tokens. Floats are float32, none
    has a gradient.

    Two names for what a rollout was paid: `outcomes` is the sum of its reward's parts, before any penalty; `rewards`
    includes the penalties.
    """

    outcomes: Tensor  # [R] the sum of `parts`
    group_sizes: Sequence[int]
    lengths: Tensor  # [R] int64, sampled tokens of each
    kept: Tensor  # [R] bool, false if no loss will see the rollout (a truncated one, if those are masked)
    behaviour_logprobs: Tensor  # [N] the engine's
    old_logprobs: Tensor  # [N] what the loss takes its ratio to
    penalties: Tensor | None = None  # [N] added token by token (a KL in the reward)
    values: Tensor | None = None  # [N] the critic's, of the state that each token was sampled in
    greedy: Tensor | None = None  # [R] what the task's greedy completion was paid
    teacher_logprobs: Tensor | None = None  # [N]
    ref_logprobs: Tensor | None = None  # [N] the reference's
    parts: Mapping[str, Tensor] = field(default_factory=dict)  # name → [R], 0 in rollouts whose reward lacks the part

    def __post_init__(self) -> None:
        if len(self.lengths) and int(self.lengths.min()) < 1:
            raise ValueError("a rollout without a sampled token has nothing to be trained on")

    @property
    def rewards(self) -> Tensor:
        """Return all that each rollout was paid, penalties included, [R]."""
        return self.outcomes if self.penalties is None else self.outcomes + self.sum_of_rollout(self.penalties)

    @property
    def token_rewards(self) -> Tensor:
        """Return penalties where they fall and the outcome at a rollout's last token, [N]."""
        rewards = torch.zeros_like(self.behaviour_logprobs) if self.penalties is None else self.penalties.clone()
        ends = self.lengths.cumsum(0) - 1
        rewards[ends] += self.outcomes
        return rewards

    @property
    def returns(self) -> Tensor:
        """Return the sum of a token's reward and all later ones of its rollout, [N]."""
        return torch.cat([cumsum(rewards.flip(0)).flip(0) for rewards in self.per_rollout(self.token_rewards)])

    @property
    def rollout(self) -> Tensor:
        """Return the number of each token's rollout, [N] int64."""
        return torch.arange(len(self.lengths), device=self.lengths.device).repeat_interleave(self.lengths)

    def named(self) -> dict[str, Tensor]:
        """Return every number [R] or [N] that is there, by the name that a person knows it by."""
        names = {
            "reward": self.outcomes,
            "engine's log-probability": self.behaviour_logprobs,
            RECOMPUTED: self.old_logprobs,
            REFERENCE: self.ref_logprobs,
            TEACHER: self.teacher_logprobs,
            VALUE: self.values,
            "greedy reward": self.greedy,
            "penalty": self.penalties,
        }
        return {name: column for name, column in names.items() if column is not None}

    def per_group(self, function: Callable[..., Tensor], *columns: Tensor) -> Tensor:
        """Apply `function(rewards [G], *columns [G]) → [G]` to every group, in order; returns [R]."""
        return self.per_group_of(function, self.rewards, *columns)

    def per_group_of(self, function: Callable[..., Tensor], *columns: Tensor) -> Tensor:
        """Apply `function(*columns [G]) → [G]` to every group, in order; returns [R]."""
        groups = zip(*(column.split(list(self.group_sizes)) for column in columns), strict=True)
        return torch.cat([function(*group) for group in groups])

    def per_rollout(self, column: Tensor) -> tuple[Tensor, ...]:
        """Return views of a column [N], one for each rollout."""
        return column.split(self.lengths.tolist())

    def to_tokens(self, column: Tensor) -> Tensor:
        """Repeat each rollout's number at each of its tokens: [R] → [N]."""
        return column.repeat_interleave(self.lengths)

    def sum_of_rollout(self, column: Tensor) -> Tensor:
        """Sum a column [N] over each rollout's tokens; returns [R]."""
        return torch.zeros_like(self.outcomes).index_add_(0, self.rollout, column.to(self.outcomes.dtype))

    def mean_of_rollout(self, column: Tensor) -> Tensor:
        """Average a column [N] over each rollout's tokens; returns [R]."""
        return self.sum_of_rollout(column) / self.lengths


@dataclass(slots=True)
class Tokens:
    """M sampled tokens of whole rollouts, as a loss sees them: [M] float32 each, a gradient through `logprobs` alone.

    rollout [M] int64: tokens with one number are one rollout's. entropy: of the policy's distribution at each token, in
    nats. look [M]: what the loss's own `look` gave each token.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    rollout: Tensor
    entropy: Tensor
    look: Tensor | None = None

    def mean_of_rollout(self, column: Tensor) -> Tensor:
        """Return at each token the mean over its rollout's tokens: [M] → [M]."""
        members, inverse, counts = self.rollout.unique(return_inverse=True, return_counts=True)
        sums = torch.zeros(len(members), dtype=column.dtype, device=column.device).index_add(0, inverse, column)
        return (sums / counts)[inverse]


@dataclass(slots=True)
class Given:
    """What an update is given of its N sampled tokens, in rollout order; [N] float32 each, none has a gradient.

    The loss is the sum over tokens of weights · (corrections · loss + KL + entropy terms), divided by `divisor`.
    """

    advantages: Tensor
    old_logprobs: Tensor
    behaviour_logprobs: Tensor
    rollout: Tensor  # [N] int64
    corrections: Tensor  # times the weights of selections
    weights: Tensor
    divisor: float
    ref_logprobs: Tensor | None = None
    look: Tensor | None = None

    def at(self, index: Tensor, logprobs: Tensor, entropy: Tensor) -> Tokens:
        """Return the tokens at `index` [M] with their current log-probabilities and entropy."""
        look = None if self.look is None else self.look[index]
        return Tokens(
            logprobs,
            self.old_logprobs[index],
            self.behaviour_logprobs[index],
            self.advantages[index],
            self.rollout[index],
            entropy.detach(),
            look,
        )

    def columns(self) -> dict[str, Tensor]:
        """Return every [N] column that is there, by its name."""
        found = ((column.name, getattr(self, column.name)) for column in fields(self) if column.name != "divisor")
        return {name: column for name, column in found if column is not None}

    def part(self, chosen: Tensor) -> Given:
        """Return what is given of the tokens that are `chosen` [N] bool."""
        columns: dict[str, Any] = {name: column[chosen] for name, column in self.columns().items()}
        return replace(self, **columns)
