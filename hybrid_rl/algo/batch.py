"""What an algorithm's parts see: the numbers of one batch, in rollout order, and no text, model or layout.

A part is a plain function in a file of its own, chosen by `_target_`; its other arguments are configuration:

    advantages(batch: Scored, …)  → [R], one for each rollout, or [N], one for each sampled token
    correct(batch: Scored, …)     → weights [N], and which tokens are kept [N] bool
    select(minibatch: Tokens, …)  → weights [N] of the tokens' losses; 0 silences a token
    look(minibatch: Tokens, …)    → numbers [N] for `tokens.look`; beside a loss, with the loss's arguments
    loss(tokens: Tokens, …)       → losses [M], and named [M] numbers whose means are reported
    aggregate(kept, rollout, max_tokens, …) → weight [N] of each token's loss, and what their sum is divided by

A loss is called once per row: a token's loss must not depend on the other rollouts in the call. `select` and `look` are
called before the rows, with the kept tokens of an update's whole minibatch and the policy's log-probabilities and
entropies at that moment. hybrid_rl/algo/contract.py checks all this.

A part's file states what the part needs and what it refuses; both are read from the source before torch loads:

    NEEDS = ("values",)             names from NEEDED in declared.py
    BOUNDS = {"clip_low": (0, 1)}   inclusive bounds of arguments; None: unbounded
    def refuses(own, run): …        yields (key, problem) for what else cannot work

`own` holds the part's arguments with their defaults, `run` is the whole configuration. `refuses` runs without the rest
of its file: it can use its two arguments and builtins, and no import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.algo.sums import cumsum

# the names in messages of the columns that a model computes
RECOMPUTED, REFERENCE, TEACHER, VALUE = (
    "recomputed log-probability",
    "reference's log-probability",
    "teacher's log-probability",
    "value",
)


@dataclass(slots=True)
class Scored:
    """A scored batch: R rollouts, those of a group side by side, with N sampled tokens; float32, without gradients.

    `outcomes` are the sums of each reward's parts, before any penalty; `rewards` include the penalties.
    """

    outcomes: Tensor  # [R] the sum of `parts`
    group_sizes: Sequence[int]
    lengths: Tensor  # [R] int64, sampled tokens of each
    kept: Tensor  # [R] bool, false for rollouts that no loss will see (truncated ones, if those are masked)
    behaviour_logprobs: Tensor  # [N] the engine's
    old_logprobs: Tensor  # [N] the denominator of the loss's ratio
    penalties: Tensor | None = None  # [N] added to each token's reward (a KL in the reward)
    values: Tensor | None = None  # [N] the critic's, of the state in which each token was sampled
    greedy: Tensor | None = None  # [R] the reward of the task's greedy completion
    teacher_logprobs: Tensor | None = None  # [N]
    ref_logprobs: Tensor | None = None  # [N] the reference's
    parts: Mapping[str, Tensor] = field(default_factory=dict)  # name → [R], 0 in rollouts whose reward lacks the part

    def __post_init__(self) -> None:
        if len(self.lengths) and int(self.lengths.min()) < 1:
            raise ValueError("a rollout without a sampled token has nothing to train on")

    @property
    def rewards(self) -> Tensor:
        """Return each rollout's reward, penalties included, [R]."""
        return self.outcomes if self.penalties is None else self.outcomes + self.sum_of_rollout(self.penalties)

    @property
    def token_rewards(self) -> Tensor:
        """Return the reward of each token, [N]: its penalty, and at a rollout's last token the outcome too."""
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
        """Return every column, [R] or [N], by its name in messages."""
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
    """M sampled tokens of whole rollouts, as a loss sees them: [M] float32 each; only `logprobs` has a gradient.

    rollout [M] int64: tokens of one rollout have the same number. entropy: of the policy's distribution at each token,
    in nats. look [M]: what the loss's own `look` returned for each token.
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
    """The inputs of an update for its N sampled tokens, in rollout order; [N] float32 each, without gradients.

    The loss is the sum over tokens of weights · (corrections · loss + KL + entropy terms), divided by `divisor`.
    """

    advantages: Tensor
    old_logprobs: Tensor
    behaviour_logprobs: Tensor
    rollout: Tensor  # [N] int64
    corrections: Tensor  # already multiplied by the weights of selections
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
        """Return every [N] column, by its name."""
        found = ((column.name, getattr(self, column.name)) for column in fields(self) if column.name != "divisor")
        return {name: column for name, column in found if column is not None}

    def part(self, chosen: Tensor) -> Given:
        """Return the inputs of the tokens that are `chosen`, [N] bool."""
        columns: dict[str, Any] = {name: column[chosen] for name, column in self.columns().items()}
        return replace(self, **columns)
