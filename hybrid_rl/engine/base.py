"""What an engine is: token ids in, token ids and log-probabilities out, memory given back on request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import torch
from torch import Tensor, nn

from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.types import FinishReason

KV_CACHE, WEIGHTS = "kv_cache", "weights"  # the tags of sleep and wake


class EngineError(RuntimeError):
    """The engine cannot do what was asked, and says what to change."""


class EngineDied(EngineError):
    """The engine is gone, or no longer answers, through no fault of the caller: `restart` makes a new one."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 takes the most likely token. top_k 0 and top_p 1 switch their filters off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 128  # sampled tokens, those of a continued request included

    def __post_init__(self) -> None:
        if not (
            0 <= self.temperature < float("inf") and 0 < self.top_p <= 1 and self.top_k >= 0 and self.max_tokens >= 1
        ):
            raise EngineError(
                f"{self}: temperature is 0 or more, 0 < top_p <= 1, top_k is 0 or more, max_tokens 1 or more"
            )


def request_seed(*facts: object) -> int:
    """A 63-bit seed that is the same for the same facts on every machine, and unrelated for different ones."""
    return int.from_bytes(blake2b("/".join(map(str, facts)).encode(), digest_size=8).digest(), "big") >> 1


@dataclass(slots=True)
class Request:
    """One completion to sample. Requests with equal `prompt_ids` share the prompt's computation.

    `sampled_ids`, `sampled_logprobs` and `versions` continue a completion that was aborted, under the current weights;
    `seed` alone fixes the random stream, whatever else the engine is doing, and a continued request goes on in it.
    """

    id: int
    prompt_ids: Sequence[int]
    seed: int
    sampled_ids: Sequence[int] = ()
    sampled_logprobs: Sequence[float] = ()
    versions: Sequence[tuple[int, int]] = ()


@dataclass(slots=True)
class Completion:
    """All sampled tokens of a request (the end token included), their log-probabilities in nats under the distribution
    at the sampling temperature before top-k/top-p (temperature 0: at 1), and the policy versions they were sampled under."""

    id: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int]]
    finish_reason: FinishReason


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was made; `cache_hit_rate` is the share of prompt tokens that needed no computation."""

    sampled_tokens: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    seconds: float = 0.0
    peak_kv_bytes: int = 0

    @property
    def cache_hit_rate(self) -> float:
        return 1 - self.computed_prompt_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.sampled_tokens / self.seconds if self.seconds else 0.0


class Engine(Protocol):
    """The protocol. All calls come from one thread; between two items of `generate` the consumer may call `abort`.

    An engine may span several ranks, its `team`: the first of them alone samples and compares weights, and the others are given no
    request; all other calls the ranks of a team make together.
    """

    team: Ranks
    version: int  # of the weights that sample now; -1 before the first handover
    stats: EngineStats
    dtype: torch.dtype  # of its weights: a handover casts to it

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Completions as they finish. Raises EngineError for a request that cannot fit, or while asleep."""

    def abort(self) -> list[Completion]:
        """Stop sampling: the partial completions of every unfinished request, with finish reason "abort"."""

    def sleep(self, tags: Iterable[str] = (KV_CACHE,)) -> int:
        """Give the tagged memory back; returns the bytes freed, which are free when this returns."""

    def wake(self, tags: Iterable[str] = (KV_CACHE,)) -> None:
        """Take the tagged memory again; waking what is awake does nothing."""

    def shares(self, module: nn.Module) -> bool:
        """Whether the engine samples from this very module, so that a handover has nothing to copy."""

    def weights(self) -> dict[str, Tensor]:
        """The engine's weights by the names of the policy's state_dict, for comparison; nothing where another rank of the team has them."""

    def update_weights(self, buckets: Iterable[dict[str, Tensor]], version: int) -> None:
        """Copy new weights in; a bucket is read before the next one is asked for.

        Raises EngineError for an unknown name, a wrong shape, or a name left out.
        """

    def set_version(self, version: int) -> None:
        """New weights are in place (shared memory): forget everything computed under the old ones."""

    def restart(self) -> None:
        """After EngineDied: a new engine, awake, that wants weights before it samples. Does nothing to one that is well."""

    def close(self) -> None: ...


def append_version(segments: Sequence[tuple[int, int]], version: int, count: int) -> list[tuple[int, int]]:
    """Run-length segments with `count` more tokens of `version` at the end; equal neighbours become one."""
    runs = list(segments)
    if runs and runs[-1][0] == version:
        count += runs.pop()[1]
    return [*runs, (version, count)] if count else runs


def known_tags(tags: Iterable[str]) -> set[str]:
    """The tags as a set. Raises EngineError for one that no engine knows."""
    tags = set(tags)
    if unknown := tags - {KV_CACHE, WEIGHTS}:
        raise EngineError(f"unknown memory tags {sorted(unknown)}; known are {KV_CACHE!r} and {WEIGHTS!r}")
    return tags


def check_request(request: Request, sampling: Sampling, capacity: int) -> None:
    """Raises EngineError for a request that `capacity` tokens, prompt included, cannot hold or that has nothing left to sample."""
    needed = len(request.prompt_ids) + sampling.max_tokens
    if not request.prompt_ids:
        raise EngineError(f"request {request.id} has an empty prompt")
    if needed > capacity:
        raise EngineError(
            f"request {request.id}: a prompt of {len(request.prompt_ids)} tokens and up to {sampling.max_tokens} new ones "
            f"need {needed}; the engine was given {capacity} (rollout.max_prompt_tokens + rollout.max_tokens)"
        )
    if len(request.sampled_ids) >= sampling.max_tokens:
        raise EngineError(
            f"request {request.id} continues {len(request.sampled_ids)} tokens; the limit is {sampling.max_tokens}"
        )
