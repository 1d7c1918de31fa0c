"""The protocol of engines: token ids in, token ids and log-probabilities out, memory released on request."""

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
    """Raised when the engine cannot do what was asked; the message says what to change."""


class EngineDied(EngineError):
    """Raised when the engine has ended or no longer answers, without the caller's fault; `restart` makes a new one."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. temperature 0 takes the most likely token; top_k 0 and top_p 1 disable these filters."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 128  # at most so many sampled tokens, those of a continued request included

    def __post_init__(self) -> None:
        if not (
            0 <= self.temperature < float("inf") and 0 < self.top_p <= 1 and self.top_k >= 0 and self.max_tokens >= 1
        ):
            raise EngineError(
                f"{self}: temperature must be 0 or more, 0 < top_p <= 1, top_k 0 or more, max_tokens 1 or more"
            )


def request_seed(*facts: object) -> int:
    """Return a 63-bit seed: the same for the same facts on every machine, unrelated for different facts."""
    return int.from_bytes(blake2b("/".join(map(str, facts)).encode(), digest_size=8).digest(), "big") >> 1


@dataclass(slots=True)
class Request:
    """One completion to sample. Requests with equal `prompt_ids` share the prompt's computation.

    `sampled_ids`, `sampled_logprobs` and `versions` continue an aborted completion under the current weights. `seed`
    alone fixes the random stream, whatever else the engine does; a continued request goes on in the same stream.
    """

    id: int
    prompt_ids: Sequence[int]
    seed: int
    sampled_ids: Sequence[int] = ()
    sampled_logprobs: Sequence[float] = ()
    versions: Sequence[tuple[int, int]] = ()


@dataclass(slots=True)
class Completion:
    """All sampled tokens of a request, the end token included.

    `logprobs` are in nats, under the whole distribution at the sampling temperature (1 if that is 0), before top-k and
    top-p. `versions` are run-length segments (policy version, number of tokens).
    """

    id: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int]]
    finish_reason: FinishReason


@dataclass(slots=True)
class EngineStats:
    """Count what the engine has done since it was made. `cache_hit_rate` is the share of prompt tokens not computed."""

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
    """What samples completions. All calls come from one thread; between two items of `generate` it may call `abort`.

    An engine may span several ranks, its `team`. Only the first of them is given requests and compares weights; all
    other calls are made by the ranks of a team together.
    """

    team: Ranks
    version: int  # of the weights that sample now; -1 before the first handover
    stats: EngineStats
    dtype: torch.dtype  # of its weights: a handover casts to it

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yield completions as they finish. Raises EngineError for a request that cannot fit, or while asleep."""

    def generate_in_pieces(
        self, requests: Sequence[Request], sampling: Sampling, tokens: int
    ) -> Iterator[list[Completion]]:
        """Yield what has ended since the item before, perhaps nothing, so that ranks can meet while they sample.

        An engine that samples in this process yields after every `tokens` decoding steps, so that an item depends on
        requests and weights alone; one in another process yields at times. What an abort overtook is the last item.
        """

    def abort(self) -> list[Completion]:
        """Stop sampling. Return the partial completions of all unfinished requests, with finish reason "abort"."""

    def sleep(self, tags: Iterable[str] = (KV_CACHE,)) -> int:
        """Release the tagged memory. Return the number of bytes, which are free when this returns."""

    def wake(self, tags: Iterable[str] = (KV_CACHE,)) -> None:
        """Allocate the tagged memory again; does nothing for memory that is awake."""

    def shares(self, module: nn.Module) -> bool:
        """Return whether the engine samples from this very module, so that a handover has nothing to copy."""

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by the names of the policy's state_dict, for comparison; {} on a team's other ranks."""

    def update_weights(self, buckets: Iterable[dict[str, Tensor]], version: int) -> None:
        """Copy new weights in; each bucket is read before the next one is requested.

        Raises EngineError for an unknown name, a wrong shape, or a missing name.
        """

    def set_version(self, version: int) -> None:
        """Note that shared memory now holds the weights of `version`; drop everything computed under the old ones."""

    def restart(self) -> None:
        """Replace a dead engine with a new one, awake, that needs weights before it samples; a living one stays."""

    def close(self) -> None:
        """End the engine and release all of its memory."""


def append_version(segments: Sequence[tuple[int, int]], version: int, count: int) -> list[tuple[int, int]]:
    """Return the run-length segments with `count` more tokens of `version` at the end; equal neighbours are merged."""
    runs = list(segments)
    if runs and runs[-1][0] == version:
        count += runs.pop()[1]
    return [*runs, (version, count)] if count else runs


def known_tags(tags: Iterable[str]) -> set[str]:
    """Return the tags as a set. Raises EngineError for an unknown one."""
    tags = set(tags)
    if unknown := tags - {KV_CACHE, WEIGHTS}:
        raise EngineError(f"unknown memory tags {sorted(unknown)}; known are {KV_CACHE!r} and {WEIGHTS!r}")
    return tags


def check_request(request: Request, sampling: Sampling, capacity: int) -> None:
    """Raise EngineError if a request and its prompt exceed `capacity` tokens, or if nothing is left to sample."""
    needed = len(request.prompt_ids) + sampling.max_tokens
    if not request.prompt_ids:
        raise EngineError(f"request {request.id} has an empty prompt")
    if needed > capacity:
        raise EngineError(
            f"request {request.id}: a prompt of {len(request.prompt_ids)} tokens and up to {sampling.max_tokens} "
            f"new ones need {needed}; the engine has room for {capacity} "
            "(rollout.max_prompt_tokens + rollout.max_tokens)"
        )
    if len(request.sampled_ids) >= sampling.max_tokens:
        raise EngineError(
            f"request {request.id} continues {len(request.sampled_ids)} tokens; the limit is {sampling.max_tokens}"
        )
