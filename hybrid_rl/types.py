"""The records passed between the parts of hybrid_rl: Task → Rollout → Group → PackedBatch.

Each record checks its invariants when it is created, so that an error appears in the part that made it. Tokens are numpy
arrays: a number takes 4 bytes instead of 32, ranks exchange and files take them as they are, and this module imports
neither torch nor transformers, so that reward workers start fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from hybrid_rl.attention.attend import AttentionLayout

# stop: by itself; length: no token was left to sample; in a conversation also turns: no answer was left, and context:
# what the environment replied did not fit
FinishReason = Literal["stop", "length", "abort", "error", "turns", "context"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error", "turns", "context")

ROUNDING = 4 * 2**-23  # rewards are equal if they differ by at most this share of the largest (float32 rounding)

# (policy version, number of consecutive tokens sampled under it)
VersionSegments = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Task:
    """A problem: chat messages to answer, the correct answer for the reward, and a demonstration for SFT.

    `columns` holds further values of its source by name, which JSON can hold, for rewards that need more than the
    answer. Raises ValueError without an id or with malformed messages.
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
    """An append-only buffer of token ids: the prompt, then sampled and observed segments.

    `token_ids` [T] int32, `loss_mask` [T] bool and `logprobs` [T] float32 have one entry per token. `loss_mask` is true
    exactly on sampled tokens; `logprobs` holds the engine's log-probability there (nats, at the sampling temperature)
    and 0.0 elsewhere. `versions` run-length encodes the policy version of the sampled tokens, in order.
    """

    task_id: str
    group_id: int
    index: int  # position inside the group
    seed: int
    token_ids: np.ndarray  # or a sequence of integers, which is copied
    prompt_length: int = field(init=False)
    loss_mask: np.ndarray = field(init=False)
    logprobs: np.ndarray = field(init=False)
    versions: list[tuple[int, int]] = field(init=False, default_factory=list)
    finish_reason: FinishReason | None = None
    completion: str = ""
    outcome: float | None = None  # what the reward function returned
    reward: float | None = None  # the outcome and what `shape` added
    reward_parts: dict[str, float] = field(default_factory=dict)
    measures: dict[str, float] = field(default_factory=dict)  # logged beside the reward, and never paid
    extracted: str | None = None  # the answer that the reward found in the completion, for majority votes
    error: str | None = None  # why there is no reward
    fault: str | None = None  # the kind of the error, as it is counted

    def __post_init__(self) -> None:
        if not len(self.token_ids):
            raise ValueError(f"task {self.task_id}: the prompt has no tokens")
        self.token_ids = np.array(self.token_ids, np.int32)
        self.prompt_length = len(self.token_ids)
        self.loss_mask = np.zeros(self.prompt_length, bool)
        self.logprobs = np.zeros(self.prompt_length, np.float32)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rollout):
            return NotImplemented
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)

    @property
    def sampled(self) -> int:
        """Return the number of sampled tokens."""
        return sum(count for _, count in self.versions)

    @property
    def turns(self) -> int:
        """Return the number of sampled segments: the policy's answers in a conversation, 1 for a single-turn task."""
        sampled = self.loss_mask[self.prompt_length :]
        return int(sampled[:1].sum() + (sampled[1:] & ~sampled[:-1]).sum())

    @property
    def truncated(self) -> bool:
        """Return whether the limit on tokens ended the rollout."""
        return self.finish_reason in ("length", "context")

    def add_sampled(self, token_ids: Sequence[int], logprobs: Sequence[float], versions: VersionSegments) -> None:
        """Append tokens that the engine sampled.

        Raises ValueError if ids, log-probabilities and versions disagree, or a log-probability is not a number of at
        most 0.
        """
        if len(token_ids) != len(logprobs) or len(token_ids) != sum(count for _, count in versions):
            raise ValueError(
                f"task {self.task_id}: {len(token_ids)} token ids, {len(logprobs)} log-probabilities, "
                f"version segments {versions}"
            )
        with np.errstate(over="ignore"):  # beyond float32 is −inf
            found = np.asarray(logprobs, np.float32)
        usable = (found > -np.inf) & (found <= 1e-4)  # not true for NaN
        if not usable.all():
            place = int(usable.argmin())
            raise ValueError(
                f"task {self.task_id}: a log-probability is not a finite number of at most 0, but {logprobs[place]} "
                f"(token {len(self.token_ids) + place})"
            )
        if any(count < 0 for _, count in versions):
            raise ValueError(f"task {self.task_id}: version segments {versions} have a negative count")
        self._extend(token_ids, found, True)
        for version, count in versions:
            if count and self.versions and self.versions[-1][0] == version:
                self.versions[-1] = (self.versions[-1][0], self.versions[-1][1] + int(count))
            elif count:
                self.versions.append((int(version), int(count)))

    def add_observed(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample (a tool's result, a user turn); the loss ignores them."""
        self._extend(token_ids, np.zeros(len(token_ids), np.float32), False)

    def _extend(self, token_ids: Sequence[int], logprobs: np.ndarray, sampled: bool) -> None:
        self.token_ids = np.concatenate([self.token_ids, np.asarray(token_ids, np.int32)])
        self.logprobs = np.concatenate([self.logprobs, logprobs])
        self.loss_mask = np.concatenate([self.loss_mask, np.full(len(token_ids), sampled)])

    def finish(self, reason: FinishReason, completion: str) -> None:
        """Record why sampling ended, and the text. Raises ValueError for an unknown reason."""
        if reason not in FINISH_REASONS:
            raise ValueError(f"task {self.task_id}: unknown finish reason {reason!r}")
        self.finish_reason, self.completion = reason, completion

    def score(
        self,
        reward: float,
        parts: dict[str, float],
        measures: Mapping[str, float] = MappingProxyType({}),
        extracted: str | None = None,
    ) -> None:
        """Record the environment's reward, its parts, its measures, which are not paid, and the answer that it found.

        Raises ValueError for non-finite numbers.
        """
        if not all(map(math.isfinite, (reward, *parts.values(), *measures.values()))):
            raise ValueError(
                f"task {self.task_id}: reward {reward} with parts {parts} and measures {dict(measures)} is not finite"
            )
        self.outcome = self.reward = float(reward)
        self.reward_parts, self.measures, self.extracted = dict(parts), dict(measures), extracted

    def shape(self, part: str, value: float) -> None:
        """Add `value` to the reward as a new part; the outcome stays.

        Raises ValueError without a reward, or if the part exists.
        """
        if self.reward is None or part in self.reward_parts:
            raise ValueError(
                f"task {self.task_id}: {part!r} cannot be added to reward {self.reward} with parts {self.reward_parts}"
            )
        self.reward += value
        self.reward_parts[part] = value


def _equal(values: Sequence[float]) -> bool:
    """Return whether the values are equal up to rounding."""
    return max(values) - min(values) <= ROUNDING * max(map(abs, values))


@dataclass(slots=True)
class Group:
    """The rollouts of one task that are compared with each other. Raises ValueError if they do not belong together."""

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
        """Return whether all rewards are known, which is later than the end of all completions."""
        return all(r.reward is not None for r in self.rollouts)

    @property
    def failed(self) -> bool:
        """Return whether a reward failed, so that the group has no true mean."""
        return any(r.error is not None for r in self.rollouts)

    @property
    def rewards(self) -> list[float]:
        """Return the rewards in index order. Raises ValueError if one is missing."""
        if not self.ready:
            raise ValueError(f"group {self.id} is not ready: a reward is missing")
        return [r.reward for r in self.rollouts if r.reward is not None]

    def silent(self, by: str = "outcome") -> bool:
        """Return whether all rollouts have the same value, so that the group has no signal.

        `by` chooses the value: "outcome", "reward" (with shaping), "parts" (each of them), or the name of a part; with
        "none" no group is silent. Raises KeyError for a part that a reward does not have.
        """
        if by == "none":
            return False
        if by == "parts":
            names = {name for r in self.rollouts for name in r.reward_parts}
            return all(_equal([r.reward_parts.get(name, 0.0) for r in self.rollouts]) for name in names)
        values = [r.reward_parts[by] for r in self.rollouts] if by not in ("outcome", "reward") else self.rewards
        if by == "outcome":
            values = [r.outcome for r in self.rollouts]  # type: ignore[misc]  # self.rewards raises unless ready
        return _equal(values)


@dataclass(slots=True)
class PackedBatch:
    """A row of tokens for the trainer, and how it maps to the sampled tokens of the batch.

    `input_ids` and `position_ids` are [T] int64. `layout` keeps attention inside each sample. The hidden state at
    position `predict_at[i]` predicts `targets[i]`, which is sampled token number `token_index[i]` of the batch (all
    three [M] int64): losses and metrics use [M] vectors and never the layout. Raises ValueError if shapes disagree.
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
                f"input_ids {tuple(self.input_ids.shape)} and position_ids {tuple(self.position_ids.shape)} "
                "must have the same shape [T]"
            )
        if not (self.predict_at.shape == self.targets.shape == self.token_index.shape):
            raise ValueError("predict_at, targets and token_index must have one length")
        if not self.predict_at.is_cpu:  # it was checked on the host, and to look here would wait for the GPU
            return
        if len(self.predict_at) and not 0 <= int(self.predict_at.min()) <= int(self.predict_at.max()) < len(
            self.input_ids
        ):
            raise ValueError("predict_at points outside the row")

    def to(self, device: Any) -> PackedBatch:
        """Return the row on another device."""
        return PackedBatch(
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            layout=self.layout.to(device),
            predict_at=self.predict_at.to(device),
            targets=self.targets.to(device),
            token_index=self.token_index.to(device),
        )
