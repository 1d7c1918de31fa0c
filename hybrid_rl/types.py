"""The records that travel: Task → Rollout → Group → PackedBatch.

Each record checks its invariants where it is made, so that a wrong fact is caught at its owner and not three
stages later. This module imports neither torch nor transformers: reward workers load it in a moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from hybrid_rl.attention.attend import AttentionLayout

FinishReason = Literal["stop", "length", "abort", "error"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")

ROUNDING = 4 * 2**-23  # float32's: rewards that differ by less, of their size, are equal

# (policy version, number of consecutive tokens sampled under it)
VersionSegments = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Task:
    """One problem: chat messages to answer, the truth the reward compares with, and what SFT may imitate.

    `columns` holds what else its source says of it, by name, for rewards that need more than the answer: values that JSON can hold.
    """

    id: str
    messages: tuple[dict[str, str], ...]
    answer: str
    demonstration: str | None = None
    source: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("a task needs an id")
        if not self.messages or any(set(m) != {"role", "content"} for m in self.messages):
            raise ValueError(f"task {self.id}: messages must be a non-empty list of {{role, content}}")


@dataclass(slots=True)
class Rollout:
    """A growing buffer of token ids: the prompt, then sampled and observed segments. Nothing is ever rewritten.

    `token_ids`, `loss_mask` and `logprobs` have one entry a token; the mask is true exactly on sampled tokens and
    `logprobs` holds the engine's log-probability there (nats, at the sampling temperature), 0.0 elsewhere.
    `versions` run-length encodes the policy version of the sampled tokens, in order.
    """

    task_id: str
    group_id: int
    index: int  # position inside the group
    seed: int
    token_ids: list[int]
    prompt_length: int = field(init=False)
    loss_mask: list[bool] = field(init=False)
    logprobs: list[float] = field(init=False)
    versions: list[tuple[int, int]] = field(init=False, default_factory=list)
    finish_reason: FinishReason | None = None
    completion: str = ""
    outcome: float | None = None  # what the reward function gave
    reward: float | None = None  # the outcome and what `shape` added
    reward_parts: dict[str, float] = field(default_factory=dict)
    error: str | None = None  # why there is no reward
    fault: str | None = None  # the error's kind, as it is counted

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError(f"task {self.task_id}: the prompt has no tokens")
        self.prompt_length = len(self.token_ids)
        self.loss_mask = [False] * self.prompt_length
        self.logprobs = [0.0] * self.prompt_length

    @property
    def sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(count for _, count in self.versions)

    def add_sampled(self, token_ids: Sequence[int], logprobs: Sequence[float], versions: VersionSegments) -> None:
        """Append tokens that the engine sampled; raises ValueError where ids, log-probabilities and versions disagree."""
        if len(token_ids) != len(logprobs) or len(token_ids) != sum(count for _, count in versions):
            raise ValueError(
                f"task {self.task_id}: {len(token_ids)} token ids, {len(logprobs)} log-probabilities, version segments {versions}"
            )
        if any(not (-math.inf < lp <= 1e-4) for lp in logprobs):  # also true for NaN
            place = next(i for i, lp in enumerate(logprobs) if not -math.inf < lp <= 1e-4)
            raise ValueError(
                f"task {self.task_id}: a log-probability is not a finite number of at most 0, but {logprobs[place]} "
                f"(token {len(self.token_ids) + place})"
            )
        if any(count < 0 for _, count in versions):
            raise ValueError(f"task {self.task_id}: version segments {versions} have a negative count")
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.loss_mask.extend([True] * len(token_ids))
        self.versions.extend((int(version), int(count)) for version, count in versions if count)

    def add_observed(self, token_ids: Sequence[int]) -> None:
        """Append tokens the policy did not choose (a tool's result, the next user turn): context, never a loss target."""
        self.token_ids.extend(token_ids)
        self.logprobs.extend([0.0] * len(token_ids))
        self.loss_mask.extend([False] * len(token_ids))

    def finish(self, reason: FinishReason, completion: str) -> None:
        if reason not in FINISH_REASONS:
            raise ValueError(f"task {self.task_id}: unknown finish reason {reason!r}")
        self.finish_reason, self.completion = reason, completion

    def score(self, reward: float, parts: dict[str, float]) -> None:
        """Record the environment's verdict; raises ValueError for a reward that is not a finite number."""
        if not math.isfinite(reward) or not all(math.isfinite(value) for value in parts.values()):
            raise ValueError(f"task {self.task_id}: reward {reward} with parts {parts} is not finite")
        self.outcome = self.reward = float(reward)
        self.reward_parts = dict(parts)

    def shape(self, part: str, value: float) -> None:
        """Add to the reward under a name of its own; the outcome stays what it was."""
        if self.reward is None or part in self.reward_parts:
            raise ValueError(
                f"task {self.task_id}: {part!r} cannot be added to reward {self.reward} with parts {self.reward_parts}"
            )
        self.reward += value
        self.reward_parts[part] = value


def _equal(values: Sequence[float]) -> bool:
    """But for rounding."""
    return max(values) - min(values) <= ROUNDING * max(map(abs, values))


@dataclass(slots=True)
class Group:
    """The G rollouts of one task that are compared with each other."""

    id: int
    task: Task
    rollouts: list[Rollout]

    def __post_init__(self) -> None:
        if not self.rollouts:
            raise ValueError(f"group {self.id} of task {self.task.id} has no rollouts")
        if any(r.task_id != self.task.id or r.group_id != self.id for r in self.rollouts):
            raise ValueError(f"group {self.id} holds a rollout of another task or group")
        if [r.index for r in self.rollouts] != list(range(len(self.rollouts))):
            raise ValueError(f"group {self.id}: rollouts are not in index order")

    @property
    def ready(self) -> bool:
        """All rewards are in (which is later than: all completions have ended)."""
        return all(r.reward is not None for r in self.rollouts)

    @property
    def failed(self) -> bool:
        """A reward could not be had, so that the group's mean would be invented."""
        return any(r.error is not None for r in self.rollouts)

    @property
    def rewards(self) -> list[float]:
        if not self.ready:
            raise ValueError(f"group {self.id} is not ready: a reward is missing")
        return [r.reward for r in self.rollouts if r.reward is not None]

    def silent(self, by: str = "outcome") -> bool:
        """Equal everywhere: the outcome, the reward with what shaped it, all "parts" of it or a named one; by "none" no group is silent.

        Raises KeyError for a part that no reward has.
        """
        if by == "none":
            return False
        if by == "parts":
            names = {name for r in self.rollouts for name in r.reward_parts}
            return all(_equal([r.reward_parts.get(name, 0.0) for r in self.rollouts]) for name in names)
        values = [r.reward_parts[by] for r in self.rollouts] if by not in ("outcome", "reward") else self.rewards
        if by == "outcome":
            values = [r.outcome for r in self.rollouts]  # type: ignore[misc]  # ready: self.rewards has raised otherwise
        return _equal(values)


@dataclass(slots=True)
class PackedBatch:
    """One row of tokens for the trainer, and how it maps to the batch's sampled tokens.

    input_ids, position_ids [T] int64. `layout` keeps attention inside each sample. The hidden state at flat
    position `predict_at[i]` predicts `targets[i]`, which is sampled token number `token_index[i]` of the batch
    (all three [M] int64): losses and metrics see [M] vectors and never the layout.
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: AttentionLayout
    predict_at: Tensor
    targets: Tensor
    token_index: Tensor

    def __post_init__(self) -> None:
        if self.input_ids.shape != self.position_ids.shape or self.input_ids.dim() != 1:
            raise ValueError(
                f"input_ids {tuple(self.input_ids.shape)} and position_ids {tuple(self.position_ids.shape)} must be equal [T]"
            )
        if not (self.predict_at.shape == self.targets.shape == self.token_index.shape):
            raise ValueError("predict_at, targets and token_index must have one length")
        if len(self.predict_at) and not 0 <= int(self.predict_at.min()) <= int(self.predict_at.max()) < len(
            self.input_ids
        ):
            raise ValueError("predict_at points outside the row")

    def to(self, device: Any) -> PackedBatch:
        return PackedBatch(
            self.input_ids.to(device), self.position_ids.to(device), self.layout.to(device),
            self.predict_at.to(device), self.targets.to(device), self.token_index.to(device),
        )  # fmt: skip
