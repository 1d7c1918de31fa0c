"""SGLang as the engine: its own process and memory, to which a handover copies the weights.

The process is `hybrid_rl.engine.sglang.host`. This module refuses what SGLang would accept silently or crash on:
unknown names, wrong shapes, ids outside the vocabulary, memory released while requests run.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_rl.engine.base import (
    KV_CACHE,
    WEIGHTS,
    Completion,
    EngineDied,
    EngineError,
    EngineStats,
    Request,
    Sampling,
    append_version,
    check_request,
    known_tags,
    request_seed,
)
from hybrid_rl.engine.sglang.interface import SEEDS, sampling_parameters, server_arguments, unusable
from hybrid_rl.engine.sglang.options import SGLangOptions
from hybrid_rl.engine.sglang.process import HostProcess
from hybrid_rl.engine.sglang.weights import ModelShapes, payload
from hybrid_rl.processes import hangs
from hybrid_rl.processes.ranks import Ranks

FRESH = "the engine is new; hand its weights over with update_weights() first"
SLEPT = "the weights were given back; hand them over with update_weights() first"
NEARLY = 0.9  # the share of the computed bytes that must come free: allocators round
UNFINISHED = "the last weight update did not finish; hand the weights over again"


class _Run:
    """Hold the requests of one `generate`: those without an answer yet, and completions that are not yet yielded."""

    def __init__(self, requests: Sequence[Request], number: int = 0, max_tokens: int = 0):
        self.number, self.max_tokens, self.clock = number, max_tokens, time.perf_counter()
        self.open = dict(enumerate(requests))  # by position
        self.finished: list[Completion] = []
        self.aborted: list[Completion] = []
        self.ended = False  # by an abort

    @property
    def running(self) -> bool:
        """Whether completions are still to come, however far SGLang's own process is."""
        return bool(self.open or (self.finished and not self.ended))


class SGLangEngine:
    """SGLang in its own process: up to `slots` completions at a time, each of up to `capacity` tokens with its prompt.

    `folder` holds the model. The ranks of a `team` make one engine with tensor parallelism: its first rank starts
    SGLang's process, which computes on the devices of all of them. The KV cache holds `slots` full completions; on a
    GPU it holds fewer if weights and cache would take more than `options.memory_fraction` of the free memory.

    Raises EngineError if SGLang is missing, or has not started within `options.start_timeout` seconds.
    """

    def __init__(
        self,
        folder: str | Path,
        end_ids: frozenset[int],
        slots: int,
        capacity: int,
        options: SGLangOptions | None = None,
        team: Ranks | None = None,
    ):
        if problem := unusable():
            raise EngineError(problem)
        self.options = options = options or SGLangOptions()
        self.slots, self.capacity, self.dtype, self.team = slots, capacity, options.dtype, team or Ranks()
        self.version = -1
        self.stats = EngineStats()
        self._ends = sorted(end_ids)
        self._checkpoint = ModelShapes.read(Path(folder))
        kv_tokens = (slots + 1) * capacity + 64
        defaults = server_arguments(str(folder), self._ends, slots, kv_tokens, options, self.team.world)
        self._arguments, self._starts = defaults | dict(options.arguments), 0
        self._share_key()
        self._host: HostProcess | None = None  # only on the first rank of a team
        self._broken: EngineError | None = None
        self._start()

    def _share_key(self) -> None:
        """Give the team the key of its first rank: processes that share tensors in host memory must know one key."""
        if self.team.world > 1:
            multiprocessing.current_process().authkey = self.team.from_main(
                lambda: bytes(multiprocessing.current_process().authkey)
            )

    def _start(self) -> None:
        self._asleep: set[str] = set()
        self._filters: tuple[bool, int, float] | None = None  # of the previous `generate`
        self._run = _Run([])
        facts = self.team.from_main(self._new_host)
        if self.capacity > facts["input"]:
            self.close()
            raise EngineError(
                f"completions of {self.capacity} tokens, prompt included: SGLang has room for {facts['input']}, "
                "by model or memory; lower rollout.max_prompt_tokens or rollout.max_tokens"
            )
        self.stats.peak_kv_bytes = self._checkpoint.kv_bytes(facts["tokens"], self.dtype)

    def _new_host(self) -> dict[str, Any]:
        o = self.options
        seed = request_seed(o.seed, "engine", self._starts) % SEEDS  # each restart takes another stream
        self._starts += 1
        self._host = HostProcess({"random_seed": seed} | self._arguments, o.start_timeout, o.timeout, o.log)
        return self._host.facts

    def restart(self) -> None:
        if self._died:
            self._start()
            self.version, self._broken = -1, EngineError(FRESH)  # the folder's weights are older than the policy's

    @property
    def _died(self) -> bool:
        """Return whether the team's process is dead. Collective within the team."""
        return self.team.from_main(lambda: self._host is None or self._host.dead)

    # ---- sampling ---------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        return self._drain(self._begin(requests, sampling))

    def generate_in_pieces(
        self, requests: Sequence[Request], sampling: Sampling, tokens: int
    ) -> Iterator[list[Completion]]:
        """Yield what has ended, as `Engine` says: SGLang has a clock of its own, so `tokens` means nothing here."""
        return self._pieces(self._begin(requests, sampling))

    def _begin(self, requests: Sequence[Request], sampling: Sampling) -> _Run:
        if self._asleep or self._broken:
            raise self._broken or EngineError(f"generate() while {sorted(self._asleep)} sleep; wake() them first")
        if requests and not self.team.main:
            raise EngineError(
                "generate() on a rank whose engine another rank asks; only the first rank of a team samples"
            )
        self._idle("generate()")
        for request in requests:
            self._check(request, sampling)
        self._run = _Run(requests, self._run.number + 1, sampling.max_tokens)
        if requests:
            self._change_filters((sampling.temperature == 0, sampling.top_k, sampling.top_p))
            items = [
                (i, [*r.prompt_ids, *r.sampled_ids], self._parameters(r, sampling)) for i, r in self._run.open.items()
            ]
            self._ask("generate", self._run.number, items, self._prefixes(items))
        return self._run

    def _prefixes(
        self, items: Sequence[tuple[int, list[int], dict[str, Any]]]
    ) -> list[tuple[list[int], dict[str, Any], list[int]]]:
        """Return each prompt that several requests share, sampling parameters for it, and the requests' positions."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for position, request in self._run.open.items():
            groups.setdefault(tuple(request.prompt_ids), []).append(position)
        shared = ((prompt, positions) for prompt, positions in groups.items() if len(positions) > 1 < len(prompt))
        return [(list(prompt), items[positions[0]][2], positions) for prompt, positions in shared]

    def _change_filters(self, filters: tuple[bool, int, float]) -> None:
        """Flush SGLang if `filters` differ from those of the previous `generate`, so that no request joins its batch.

        A batch that ever held a greedy or filtered row draws from sorted probabilities for the rest of its life, and
        the same seed then gives other tokens.
        """
        before, self._filters = self._filters, filters
        if before not in (None, filters):
            try:
                self._own.call("flush")
            except EngineDied as error:
                raise self._lost(error) from None

    def _drain(self, run: _Run) -> Iterator[Completion]:
        try:
            while self._run is run and (run.open or run.finished):
                if not run.finished or (run.open and self._own.waits()):  # a batch of answers at a time
                    self._next(run)
                else:
                    yield run.finished.pop(0)
        finally:  # also when the consumer stops early
            self._leave(run)

    def _pieces(self, run: _Run) -> Iterator[list[Completion]]:
        try:
            while self._run is run and (run.open or run.finished):
                if run.open:
                    self._next(run)  # at times this is only a sign of progress
                while run.open and self._own.waits():
                    self._next(run)
                piece, run.finished = run.finished, []
                yield piece
        finally:
            self._leave(run)

    def _leave(self, run: _Run) -> None:
        """End a run that its consumer has left, if it is still the last one."""
        if self._run is run and not self._broken:
            self.abort()
            run.finished.clear()

    def abort(self) -> list[Completion]:
        run = self._run
        run.ended = True
        if run.open:
            self._ask("abort", run.number)
            while self._next(run):
                pass
        aborted, run.aborted = run.aborted, []
        return aborted

    def _next(self, run: _Run) -> bool:
        """Handle one message of a run. Return False when an abort has ended it."""
        try:
            kind, number, *rest = self._own.receive()
        except EngineDied as error:
            raise self._lost(error) from None
        hangs.progress()
        if kind == "computed":
            self.stats.computed_prompt_tokens += rest[0]
        if number != run.number or kind in ("progress", "computed"):  # or left from a run that ended in an error
            return True
        if kind == "aborted":
            return False
        before, run.clock = run.clock, time.perf_counter()
        self.stats.seconds += run.clock - before
        request = run.open.pop(rest[0])
        if kind == "refused":
            run.open.clear()
            self._ask("abort", number)
            raise EngineError(f"SGLang refused request {request.id}: {rest[1]}")
        _, ids, logprobs, facts = rest
        completion = self._completion(request, ids, logprobs, facts, run.max_tokens)
        (run.aborted if completion.finish_reason == "abort" else run.finished).append(completion)
        return True

    def _completion(
        self, request: Request, ids: list[int], logprobs: list[float], facts: dict[str, Any], max_tokens: int
    ) -> Completion:
        prompt = facts["prompt_tokens"]
        self.stats.sampled_tokens += len(ids)
        self.stats.prompt_tokens += prompt
        self.stats.computed_prompt_tokens += prompt - facts["cached_tokens"]
        if len(ids) != len(logprobs):
            raise EngineError(
                f"request {request.id}: SGLang gave {len(ids)} tokens and {len(logprobs)} log-probabilities"
            )
        versions = list(request.versions)
        for version, count in facts["versions"]:
            versions = append_version(versions, version, count)
        whole, reason = [*request.sampled_ids, *ids], facts["finish_reason"]
        ended = ids and (ids[-1] in self._ends or len(whole) >= max_tokens)
        if reason == "abort" and ended:  # by itself, in the very step of the abort
            reason = "stop" if ids[-1] in self._ends else "length"
        return Completion(request.id, whole, [*request.sampled_logprobs, *logprobs], versions, reason)

    def _parameters(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        left = sampling.max_tokens - len(request.sampled_ids)
        return sampling_parameters(sampling, self._ends, left, request.seed)

    def _check(self, request: Request, sampling: Sampling) -> None:
        check_request(request, sampling, self.capacity)
        ids = (*request.prompt_ids, *request.sampled_ids)
        if not 0 <= min(ids) <= max(ids) < self._checkpoint.vocabulary:
            raise EngineError(
                f"request {request.id} has an id outside the vocabulary of {self._checkpoint.vocabulary}: "
                f"{min(ids)} … {max(ids)}"
            )

    def _idle(self, what: str) -> None:
        if self._run.running:
            raise EngineError(f"{what} while requests are running; exhaust generate() or abort() first")

    # ---- memory -----------------------------------------------------------------------------------------------------

    def sleep(self, tags: Iterable[str] = (KV_CACHE,)) -> int:
        """Release memory. Weights that slept are lost: `generate` then needs an `update_weights` first."""
        wanted = known_tags(tags)
        self._idle("sleep()")
        if not (wanted := wanted - self._asleep):
            return 0
        before = self.team.on_all(self._used)  # before the memory of any rank is released
        self._call("release", sorted(wanted))
        self._asleep |= wanted
        if WEIGHTS in wanted:
            self._broken = EngineError(SLEPT)
        return given_back(self._used, before, self._owed(wanted), self.options.timeout)

    def wake(self, tags: Iterable[str] = (KV_CACHE,)) -> None:
        wanted = known_tags(tags) & self._asleep
        for tag in sorted(wanted, reverse=True):  # the weights first
            self._call("resume", [tag])
            self._asleep.discard(tag)

    def _owed(self, tags: set[str]) -> int:
        """Return the bytes that must come free on this rank's GPU, or 0 if they cannot be known.

        They are unknown on the CPU, where pages that were never written take no memory, and for dtypes that SGLang
        chooses.
        """
        if self.options.device.type == "cpu" or self._arguments.keys() & {"kv_cache_dtype", "quantization"}:
            return 0
        whole = {KV_CACHE: self.stats.peak_kv_bytes, WEIGHTS: self._checkpoint.weight_bytes(self.dtype)}
        return sum(whole[tag] for tag in tags) // self.team.world

    def _used(self) -> int:
        """Return the bytes in use on this rank's device; on the CPU, those of SGLang's processes."""
        if self.options.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.options.device)
            return total - free
        return self._host.resident() if self._host else 0

    def close(self) -> None:
        self._run = _Run([], self._run.number)
        self._broken = EngineError("the engine is closed")
        if self._host:
            self._host.close()

    # ---- weights ----------------------------------------------------------------------------------------------------

    def shares(self, module: nn.Module) -> bool:
        return False

    def set_version(self, version: int) -> None:
        self._idle("a new version")
        self._call("version", version)
        self.version = version

    def update_weights(self, buckets: Iterable[dict[str, Tensor]], version: int) -> None:
        self._idle("new weights")
        if WEIGHTS in self._asleep:
            raise EngineError("update_weights() while the weights sleep; wake() them first")
        missing = set(self._checkpoint.shapes)
        self._broken = EngineError(UNFINISHED)
        self._call("begin")
        try:
            for names, payloads in self._payloads(buckets):
                self._call("load", payloads)  # read by all of SGLang's ranks when this returns
                if self.options.device.type == "cuda":  # frees what they let go of; torch keeps it otherwise
                    torch.cuda.ipc_collect()
                missing -= names
            if missing:
                absent = ", ".join(sorted(missing)[:3])
                raise EngineError(f"update_weights: no new value for {absent}{' …' if len(missing) > 3 else ''}")
        except EngineDied:
            raise
        except Exception:
            self._call("end")
            raise
        self._call("end")
        self.set_version(version)
        self._broken = None

    def _payloads(self, buckets: Iterable[dict[str, Tensor]]) -> Iterator[tuple[set[str], list[bytes]]]:
        """Yield each bucket's names in the checkpoint, and every rank's pickled copy of it. Collective in the team.

        An error on one rank is raised on all.
        """
        walk = iter(buckets)

        def next_one() -> tuple[set[str], bytes] | None:
            for bucket in walk:
                if named := [(self._checkpoint.own_name(name, tensor), tensor) for name, tensor in bucket.items()]:
                    return {name for name, _ in named}, payload(named, self.options.device, self.dtype)
            return None

        while (made := self.team.on_all(next_one)) is not None:
            yield made[0], self.team.all_gather(made[1])

    def weights(self) -> dict[str, Tensor]:
        """Return the weights, read back through files, by the checkpoint's names; {} on a team's other ranks.

        Raises EngineError for a weight that SGLang stores in another form.
        """
        if WEIGHTS in self._asleep:
            raise EngineError("weights() while they sleep; wake() them first")

        def read() -> dict[str, Tensor]:
            with tempfile.TemporaryDirectory() as folder:
                self._own.call(
                    "save", folder, limit=self.options.start_timeout
                )  # the disk takes this time, not the engine
                return self._checkpoint.whole(Path(folder))

        held: list[dict[str, Tensor]] = []
        self._together(lambda: held.append(read()))
        return held[0] if held else {}

    # ---- the other process ------------------------------------------------------------------------------------------

    @property
    def _own(self) -> HostProcess:
        assert self._host is not None  # only a team's first rank calls the process
        return self._host

    def _call(self, operation: str, *arguments: object) -> None:
        self._together(lambda: self._own.call(operation, *arguments))

    def _together(self, function: Callable[[], None]) -> None:
        """Call `function` on the team's first rank while the others wait for it."""
        try:
            self.team.from_main(function)
        except EngineDied as error:
            raise self._lost(error) from None

    def _ask(self, *message: object) -> None:
        try:
            self._own.tell(*message)
        except EngineDied as error:
            raise self._lost(error) from None

    def _lost(self, error: EngineDied) -> EngineDied:
        self._run = _Run([], self._run.number)
        self._broken = error
        return error


def given_back(used: Callable[[], int], before: int, owed: int, limit: float) -> int:
    """Wait until `used()` has fallen below `before` by nearly `owed` bytes, and return by how many it has.

    SGLang may answer before its memory is free. Raises EngineError after `limit` seconds: otherwise the trainer would
    run out of memory later, far from the cause.
    """
    deadline = time.monotonic() + limit
    while (freed := before - used()) < NEARLY * owed:
        if time.monotonic() > deadline:
            raise EngineError(
                f"SGLang said that it had given back {owed / 2**30:.2f} GiB, and {max(freed, 0) / 2**30:.2f} GiB have "
                f"come free within engine.timeout={limit:g} s"
            )
        time.sleep(0.005)
    return max(freed, 0)
