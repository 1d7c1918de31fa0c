"""The embedded engine: samples from any causal LM of transformers, in this process, on the policy's own parameters.

Continuous batching over a fixed number of slots. Requests enter when slots are free; a prompt is computed once for all
requests that share it and copied into their slots; rows that finish leave at once and the last active rows take their
place, so that every decoding step works on a dense batch.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rl.engine.base import (
    KV_CACHE,
    Completion,
    EngineError,
    EngineStats,
    Request,
    Sampling,
    append_version,
    check_request,
    known_tags,
)
from hybrid_rl.engine.kv_cache import Decode, KVCache, Prefill
from hybrid_rl.engine.sampling import sample, uniforms
from hybrid_rl.processes import hangs
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.types import FinishReason

PREFILL_TOKENS = 8192  # prompt tokens that go through the model in one forward pass


@dataclass(slots=True)
class _Prefix:
    """A prompt's keys and values per layer, and the logits [V] of the next token; dropped after its last user."""

    keys: list[Tensor]
    values: list[Tensor]
    logits: Tensor


class _Rows:
    """Host-side state of the active rows, one per slot: what was sampled so far, and each row's random stream."""

    def __init__(self, slots: int, max_tokens: int):
        self.requests: list[Request] = []
        self.ids = np.zeros((slots, max_tokens), dtype=np.int64)
        self.logprobs = np.zeros((slots, max_tokens), dtype=np.float32)
        self.uniforms = np.zeros((slots, max_tokens), dtype=np.float32)
        self.counts = np.zeros(slots, dtype=np.int64)

    def add(self, request: Request) -> None:
        row, done = len(self.requests), len(request.sampled_ids)
        self.ids[row, :done], self.logprobs[row, :done] = request.sampled_ids, request.sampled_logprobs
        self.uniforms[row] = uniforms(request.seed, self.uniforms.shape[1])
        self.counts[row] = done
        self.requests.append(request)

    def move(self, source: int, target: int) -> None:
        for array in (self.ids, self.logprobs, self.uniforms, self.counts):
            array[target] = array[source]
        self.requests[target] = self.requests[source]


class LocalEngine:
    """Sample up to `slots` completions at a time, each of at most `capacity` tokens with its prompt.

    `model` must be loaded with hybrid_rl's attention. Its parameters, in `dtype` on `device`, need to exist only while
    the weights are awake. The KV cache has the same dtype.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        end_ids: frozenset[int],
        slots: int,
        capacity: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        self.model, self.slots, self.capacity = model, slots, capacity
        self.team, self.version = Ranks(), -1
        self.stats = EngineStats()
        self.dtype, self._device = dtype, torch.device(device)
        vocabulary = max(model.get_output_embeddings().weight.shape[0], max(end_ids) + 1)
        self._ends = np.zeros(vocabulary, dtype=bool)  # [V]: whether the token ends a completion
        self._ends[list(end_ids)] = True
        self._cache: KVCache | None = None
        self._asleep: set[str] = set()
        self._broken: str | None = None
        self._reset()

    def _reset(self, max_tokens: int = 0) -> None:
        self._waiting: deque[Request] = deque()
        self._rows = _Rows(self.slots if max_tokens else 0, max_tokens)
        self._prefixes: dict[tuple[int, ...], _Prefix] = {}
        self._users: Counter[tuple[int, ...]] = Counter()  # waiting requests per prefix

    # ---- sampling -------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        pieces = self.generate_in_pieces(requests, sampling, 1)
        return (completion for piece in pieces for completion in piece)

    def generate_in_pieces(
        self, requests: Sequence[Request], sampling: Sampling, tokens: int
    ) -> Iterator[list[Completion]]:
        if self._broken or self._asleep:
            raise EngineError(self._broken or f"generate() while {sorted(self._asleep)} sleep; wake() them first")
        if self._rows.requests or self._waiting:
            raise EngineError("generate() while another one is under way; exhaust it or abort() first")
        for request in requests:
            check_request(request, sampling, self.capacity)
        self._reset(sampling.max_tokens)
        self._waiting.extend(requests)
        self._users.update(_prefix_of(request) for request in requests)
        return self._drain(sampling, self._rows, tokens)

    def _drain(self, sampling: Sampling, rows: _Rows, tokens: int) -> Iterator[list[Completion]]:
        try:
            while self._rows is rows and (rows.requests or self._waiting):
                start, finished = time.perf_counter(), list[Completion]()
                for _ in range(tokens):
                    finished += self._advance(sampling)
                self.stats.seconds += time.perf_counter() - start
                hangs.progress()
                yield finished
        finally:  # also when the consumer stops early
            if self._rows is rows:  # a generator that is dropped late must not end the one that followed it
                self._reset()

    def abort(self) -> list[Completion]:
        unfinished = [self._completion(row, "abort") for row in range(len(self._rows.requests))]
        unfinished += [
            Completion(r.id, list(r.sampled_ids), list(r.sampled_logprobs), list(r.versions), "abort")
            for r in self._waiting
        ]
        self._reset()
        return unfinished

    @torch.inference_mode()
    def _advance(self, sampling: Sampling) -> list[Completion]:
        """Admit what fits, then sample one token for every row. Return the completions that ended."""
        finished: list[Completion] = []
        if self._waiting and len(self._rows.requests) < self.slots:
            finished += self._admit(sampling)
        if rows := len(self._rows.requests):
            layout = Decode(self._kv(), rows)
            last = self._rows.ids[np.arange(rows), self._rows.counts[:rows] - 1]
            logits = self._forward(torch.from_numpy(last)[:, None], layout.positions[:, None], layout, 1)[:, 0]
            finished += self._take(0, logits, sampling)
        return finished

    def _admit(self, sampling: Sampling) -> list[Completion]:
        """Move waiting requests into free slots; new prompts go through the model packed into one row."""
        first = len(self._rows.requests)
        admitted = [self._waiting.popleft() for _ in range(min(self.slots - first, len(self._waiting)))]
        slots_of: dict[tuple[int, ...], list[int]] = {}
        for slot, request in enumerate(admitted, start=first):
            slots_of.setdefault(_prefix_of(request), []).append(slot)
            self._rows.add(request)
        self._prefill([prompt for prompt in slots_of if prompt not in self._prefixes])
        logits = torch.stack([self._prefixes[_prefix_of(request)].logits for request in admitted])
        for prompt, slots in slots_of.items():
            prefix = self._prefixes[prompt]
            self._kv().store(slots, prefix.keys, prefix.values)
            self.stats.prompt_tokens += len(prompt) * len(slots)
            self._users[prompt] -= len(slots)
            if not self._users[prompt]:
                del self._prefixes[prompt], self._users[prompt]
        return self._take(first, logits, sampling)

    def _prefill(self, prompts: list[tuple[int, ...]]) -> None:
        while prompts:
            take, tokens = 1, len(prompts[0])
            while take < len(prompts) and tokens + len(prompts[take]) <= PREFILL_TOKENS:
                tokens += len(prompts[take])
                take += 1
            chunk, prompts = prompts[:take], prompts[take:]
            lengths = [len(prompt) for prompt in chunk]
            layout = Prefill(lengths)
            ids = torch.tensor([token for prompt in chunk for token in prompt])[None]
            positions = torch.cat([torch.arange(length) for length in lengths])[None]
            ends = torch.tensor(lengths).cumsum(0) - 1
            logits = self._forward(ids, positions, layout, ends)[0]
            for i, prompt in enumerate(chunk):
                self._prefixes[prompt] = _Prefix([k[i] for k in layout.keys], [v[i] for v in layout.values], logits[i])
            self.stats.computed_prompt_tokens += tokens
            if self._cache is None:
                self._allocate(layout)

    def _forward(self, ids: Tensor, positions: Tensor, layout: object, keep: int | Tensor) -> Tensor:
        keep = keep.to(self._device) if isinstance(keep, Tensor) else keep
        return self.model(
            input_ids=ids.to(self._device),
            position_ids=positions.to(self._device),
            use_cache=False,
            layout=layout,
            logits_to_keep=keep,
        ).logits

    def _take(self, first: int, logits: Tensor, sampling: Sampling) -> list[Completion]:
        """Sample the next token of all rows from `first` on, record it, and remove the rows that ended."""
        rows, state = np.arange(first, len(self._rows.requests)), self._rows
        counts = state.counts[rows]
        ids, logprobs = sample(logits, torch.from_numpy(state.uniforms[rows, counts]).to(self._device), sampling)
        state.ids[rows, counts] = tokens = ids.cpu().numpy()
        state.logprobs[rows, counts] = logprobs.cpu().numpy()
        state.counts[rows] += 1
        self.stats.sampled_tokens += len(rows)
        stopped = self._ends[tokens]
        over = rows[stopped | (counts + 1 >= sampling.max_tokens)]
        if not len(over):
            return []
        stops = set(rows[stopped].tolist())
        finished = [self._completion(row, "stop" if row in stops else "length") for row in over.tolist()]
        self._compact(over.tolist())
        return finished

    def _compact(self, over: list[int]) -> None:
        """Fill the slots of rows that ended with the last active ones."""
        kept = len(self._rows.requests) - len(over)
        gaps = [row for row in over if row < kept]
        fillers = [row for row in range(kept, len(self._rows.requests)) if row not in set(over)]
        for source, target in zip(fillers, gaps, strict=True):
            self._rows.move(source, target)
        if gaps:
            self._kv().move(fillers, gaps)
        del self._rows.requests[kept:]

    def _completion(self, row: int, reason: FinishReason) -> Completion:
        request, count = self._rows.requests[row], int(self._rows.counts[row])
        versions = append_version(request.versions, self.version, count - len(request.sampled_ids))
        ids, logprobs = self._rows.ids[row, :count].tolist(), self._rows.logprobs[row, :count].tolist()
        return Completion(request.id, ids, logprobs, versions, reason)

    # ---- memory ---------------------------------------------------------------------------------------------------

    def _kv(self) -> KVCache:
        assert self._cache is not None  # made when the first prompt was computed
        return self._cache

    def _allocate(self, prefill: Prefill) -> None:
        """Allocate the whole cache once; the first prompt's keys and values show each layer's heads and sizes."""
        self._cache = KVCache(
            self.slots,
            self.capacity,
            [k[0].shape for k in prefill.keys],
            [v[0].shape for v in prefill.values],
            self.dtype,
            self._device,
        )
        self.stats.peak_kv_bytes = max(self.stats.peak_kv_bytes, self._cache.bytes)

    def sleep(self, tags: Iterable[str] = (KV_CACHE,)) -> int:
        """Free the cache; the policy's weights stay. Raises EngineError if the cache is still in use."""
        tags = known_tags(tags)
        if self._rows.requests or self._waiting:
            raise EngineError("sleep() while requests are running; exhaust generate() or abort() first")
        self._asleep |= tags
        if KV_CACHE not in tags or self._cache is None:
            return 0
        freed, held = self._cache.bytes, [weakref.ref(t) for t in (*self._cache.keys, *self._cache.values)]
        self._cache = None
        if any(ref() is not None for ref in held):
            raise EngineError("the KV cache was given back, but something still refers to its memory")
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return freed

    def wake(self, tags: Iterable[str] = (KV_CACHE,)) -> None:
        self._asleep -= known_tags(tags)

    def restart(self) -> None:
        """Do nothing: this engine ends with its process, so it can never be found dead."""

    def close(self) -> None:
        self.abort()
        self._cache = None

    # ---- weights --------------------------------------------------------------------------------------------------

    def shares(self, module: nn.Module) -> bool:
        return module is self.model

    def set_version(self, version: int) -> None:
        if self._rows.requests or self._waiting:
            raise EngineError("new weights while requests are running; exhaust generate() or abort() first")
        self.version, self._broken = version, None

    @torch.no_grad()
    def update_weights(self, buckets: Iterable[dict[str, Tensor]], version: int) -> None:
        if self._rows.requests or self._waiting:
            raise EngineError("new weights while requests are running; exhaust generate() or abort() first")
        own, seen = self.weights(), set()
        self._broken = "the last weight update did not finish; hand the weights over again"
        for name, tensor in (item for bucket in buckets for item in bucket.items()):
            if name not in own:
                raise EngineError(f"update_weights: unknown name {name!r}")
            if own[name].shape != tensor.shape:
                raise EngineError(
                    f"update_weights: {name} has shape {tuple(tensor.shape)}, the engine's is {tuple(own[name].shape)}"
                )
            own[name].copy_(tensor)
            seen.add(own[name].data_ptr())  # by memory: a tied weight may have either of its names
        if missing := sorted(name for name, tensor in own.items() if tensor.data_ptr() not in seen):
            raise EngineError(
                f"update_weights: no new value for {', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}"
            )
        self.set_version(version)

    def weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()


def _prefix_of(request: Request) -> tuple[int, ...]:
    return (*request.prompt_ids, *request.sampled_ids)
