"""SGLang as the engine: its own process and memory, to which a handover copies the weights.

The process is `hybrid_rl.engine.sglang_host`. What SGLang would take without a word or die of (unknown names, wrong shapes, ids outside
the vocabulary, memory given back under running requests) is refused here, before it is asked. Tensor parallelism is 1.
"""

from __future__ import annotations

import importlib.util
import io
import json
import math
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import IO, Any

import psutil
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig

from hybrid_rl.engine.base import (
    KV_CACHE,
    WEIGHTS,
    Completion,
    EngineError,
    EngineStats,
    Request,
    Sampling,
    append_version,
    check_request,
    known_tags,
)

# SGLang's one matrix for several of a checkpoint's, stacked in this order
STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
TIED = ("model.embed_tokens.weight", "lm_head.weight")
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")  # ours, not the engine's


class _Run:
    """Requests under way: those without an answer yet, and the completions that wait to be asked for."""

    def __init__(self, requests: Sequence[Request], number: int = 0, max_tokens: int = 0):
        self.number, self.max_tokens, self.clock = number, max_tokens, time.perf_counter()
        self.open = dict(enumerate(requests))  # by position
        self.finished: list[Completion] = []
        self.aborted: list[Completion] = []


class SGLangEngine:
    """`slots` completions at a time, each of at most `capacity` tokens, prompt included; the model is read from `folder`.

    On a GPU weights and KV cache together take `memory_fraction` of the device; on the CPU the cache holds `slots` full completions.
    `extra` are more arguments of `sglang.Engine`, and win. Raises EngineError where SGLang is missing or does not start.
    """

    def __init__(
        self, folder: str | Path, end_ids: frozenset[int], slots: int, capacity: int, device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32, memory_fraction: float = 0.5, extra: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        if importlib.util.find_spec("sglang") is None:
            raise EngineError("engine=sglang needs SGLang, which is not installed; pip install 'hybrid_rl[sglang]', or engine=local")
        self.slots, self.capacity, self.dtype = slots, capacity, dtype
        self.version = -1
        self.stats = EngineStats()
        self._device = torch.device(device)
        self._ends = sorted(end_ids)
        self._shapes = _checkpoint_shapes(Path(folder))
        config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
        self._vocabulary, self._tied = int(config.vocab_size), bool(config.tie_word_embeddings)
        self._asleep: set[str] = set()
        self._broken: str | None = None
        self._run = _Run([])
        arguments = self._arguments(str(folder), memory_fraction) | dict(extra or {})
        self._process, self._connection, self._log = _start(arguments)
        self._close = weakref.finalize(self, _end, self._process, self._connection)  # also at exit, where nobody called close()
        kind, facts = self._receive()
        if kind != "ready":
            self.close()
            raise EngineError(f"SGLang did not start: {facts}")
        if capacity > facts["input"]:
            self.close()
            room = facts["input"]
            raise EngineError(f"completions of {capacity} tokens, prompt included: SGLang has room for {room}, by model or memory")
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.stats.peak_kv_bytes = 2 * config.num_hidden_layers * heads * head * facts["tokens"] * dtype.itemsize

    def _arguments(self, folder: str, memory_fraction: float) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "model_path": folder, "dtype": str(self.dtype).removeprefix("torch."), "skip_tokenizer_init": True, "random_seed": 0,
            "max_running_requests": self.slots, "enable_memory_saver": True, "enable_deterministic_inference": True,
            "sampling_backend": "pytorch", "weight_version": str(self.version), "log_level": "error",
            "sleep_on_idle": True,  # or its loop keeps a core busy while we train
            "json_model_override_args": json.dumps({"eos_token_id": self._ends}), "device": self._device.type,
        }  # fmt: skip
        if self._device.type == "cpu":
            tokens = (self.slots + 1) * self.capacity + 64
            return arguments | {"attention_backend": "torch_native", "disable_cuda_graph": True, "max_total_tokens": tokens}
        return arguments | {"mem_fraction_static": memory_fraction, "base_gpu_id": self._device.index or 0}

    # ---- sampling -------------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        if self._asleep or self._broken:
            raise EngineError(f"generate() while {sorted(self._asleep)} sleep; wake() them first" if self._asleep else self._broken)
        self._idle("generate()")
        for request in requests:
            self._check(request, sampling)
        self._run = _Run(requests, self._run.number + 1, sampling.max_tokens)
        if requests:
            items = [(i, [*r.prompt_ids, *r.sampled_ids], self._parameters(r, sampling)) for i, r in self._run.open.items()]
            self._tell("generate", self._run.number, items)
        return self._drain(self._run)

    def _drain(self, run: _Run) -> Iterator[Completion]:
        try:
            while self._run is run and (run.open or run.finished):
                if not run.finished or (run.open and self._connection.poll(0)):  # a batch of answers at a time
                    self._next(run)
                else:
                    yield run.finished.pop(0)
        finally:  # also when the consumer stops early
            if self._run is run and not self._broken:
                self.abort()
                run.finished.clear()

    def abort(self) -> list[Completion]:
        run = self._run
        if run.open:
            self._tell("abort", run.number)
            while self._next(run):
                pass
        aborted, run.aborted = run.aborted, []
        return aborted

    def _next(self, run: _Run) -> bool:
        """Take in one message of a run; returns False at its end by abort."""
        kind, number, *rest = self._receive()
        if number != run.number:  # of a run that ended in an error
            return True
        if kind == "aborted":
            return False
        before, run.clock = run.clock, time.perf_counter()
        self.stats.seconds += run.clock - before
        request = run.open.pop(rest[0])
        if kind == "refused":
            run.open.clear()
            self._tell("abort", number)
            raise EngineError(f"SGLang refused request {request.id}: {rest[1]}")
        _, ids, logprobs, facts = rest
        completion = self._completion(request, ids, logprobs, facts, run.max_tokens)
        (run.aborted if completion.finish_reason == "abort" else run.finished).append(completion)
        return True

    def _completion(
        self, request: Request, ids: list[int], logprobs: list[float], facts: dict[str, Any], max_tokens: int
    ) -> Completion:  # fmt: skip
        prompt = facts.get("prompt_tokens", 0)
        self.stats.sampled_tokens += len(ids)
        self.stats.prompt_tokens += prompt
        self.stats.computed_prompt_tokens += prompt - facts.get("cached_tokens", 0)
        if len(ids) != len(logprobs):
            raise EngineError(f"request {request.id}: SGLang gave {len(ids)} tokens and {len(logprobs)} log-probabilities")
        versions = list(request.versions)
        for span in facts.get("weight_versions") or ():
            versions = append_version(versions, int(span["version"]), span["end"] - span["start"])
        whole, reason = [*request.sampled_ids, *ids], facts["finish_reason"]["type"]
        if reason == "abort" and ids and (ids[-1] in self._ends or len(whole) >= max_tokens):  # it ended in the very step of the abort
            reason = "stop" if ids[-1] in self._ends else "length"
        return Completion(request.id, whole, [*request.sampled_logprobs, *logprobs], versions, reason)

    def _parameters(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        return {
            "temperature": sampling.temperature, "top_k": sampling.top_k or -1, "top_p": sampling.top_p, "stop_token_ids": self._ends,
            "max_new_tokens": sampling.max_tokens - len(request.sampled_ids), "sampling_seed": request.seed % 2**63,
        }  # fmt: skip

    def _check(self, request: Request, sampling: Sampling) -> None:
        check_request(request, sampling, self.capacity)
        ids = (*request.prompt_ids, *request.sampled_ids)
        if not 0 <= min(ids) <= max(ids) < self._vocabulary:
            raise EngineError(f"request {request.id} has an id outside the vocabulary of {self._vocabulary}: {min(ids)} … {max(ids)}")

    def _idle(self, what: str) -> None:
        if self._run.open:
            raise EngineError(f"{what} while requests are running; exhaust generate() or abort() first")

    # ---- memory ---------------------------------------------------------------------------------------------------------

    def sleep(self, tags: Iterable[str] = (KV_CACHE,)) -> int:
        """What the weights were is gone: after they slept, generate() wants an update_weights() first."""
        wanted = known_tags(tags)
        self._idle("sleep()")
        if not (wanted := wanted - self._asleep):
            return 0
        before = self._used()
        self._call("release", sorted(wanted))
        self._asleep |= wanted
        if WEIGHTS in wanted:
            self._broken = "the weights were given back; hand them over with update_weights() first"
        return max(0, before - self._used())

    def wake(self, tags: Iterable[str] = (KV_CACHE,)) -> None:
        wanted = known_tags(tags) & self._asleep
        for tag in sorted(wanted, reverse=True):  # the weights first
            self._call("resume", [tag])
            self._asleep.discard(tag)

    def _used(self) -> int:
        """Bytes of the device in use; on the CPU those of SGLang's processes."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            return total - free
        try:
            return sum(child.memory_info().rss for child in psutil.Process(self._process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            raise self._ended() from None

    def close(self) -> None:
        self._run = _Run([], self._run.number)
        self._broken = "the engine is closed"
        self._close()

    # ---- weights --------------------------------------------------------------------------------------------------------

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
        missing = set(self._shapes)
        self._broken = "the last weight update did not finish; hand the weights over again"
        self._call("begin")
        try:
            for bucket in buckets:
                named = [(self._own_name(name, tensor), tensor) for name, tensor in bucket.items()]
                if named:
                    self._call("load", [self._payload(named)])
                missing -= {name for name, _ in named}
            if missing:
                names = sorted(missing)
                raise EngineError(f"update_weights: no new value for {', '.join(names[:3])}{' …' if len(names) > 3 else ''}")
        finally:
            if self._process.poll() is None:
                self._call("end")
        self.set_version(version)
        self._broken = None

    def _own_name(self, name: str, tensor: Tensor) -> str:
        """The checkpoint's name of a weight; a tied one may come under either of its two."""
        if self._tied and name in TIED and name not in self._shapes:
            name = next(other for other in TIED if other != name)
        if name not in self._shapes:
            raise EngineError(f"update_weights: unknown name {name!r}")
        if tuple(tensor.shape) != self._shapes[name]:
            raise EngineError(f"update_weights: {name} has shape {tuple(tensor.shape)}, the engine's is {self._shapes[name]}")
        return name

    def _payload(self, named: list[tuple[str, Tensor]]) -> bytes:
        """One flat tensor in memory that SGLang's processes can map, and what lies where in it."""
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        held = [(name, tensor.detach().to(self._device, self.dtype if tensor.is_floating_point() else None)) for name, tensor in named]
        bucket = FlattenedTensorBucket(named_tensors=held)
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump({"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()})
        return buffer.getvalue()

    def weights(self) -> dict[str, Tensor]:
        """Read back through a file, by the checkpoint's names. Raises EngineError for one that SGLang stores in another form."""
        if WEIGHTS in self._asleep:
            raise EngineError("weights() while they sleep; wake() them first")
        with tempfile.TemporaryDirectory() as folder:
            self._call("save", folder)
            own = {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}
        held = {name: self._part(own, name) for name in self._shapes}
        if self._tied:
            held |= dict.fromkeys(TIED, next(held[name] for name in TIED if name in held))
        return held

    def _part(self, own: dict[str, Tensor], name: str) -> Tensor:
        rows = self._shapes[name][0]
        for alias in (name, *(TIED if self._tied and name in TIED else ())):
            if alias in own:
                return own[alias][:rows]  # the vocabulary is padded
        head, _, leaf = name.rpartition(".")
        head, _, part = head.rpartition(".")
        for stacked, parts in STACKED.items():
            if part in parts and (whole := own.get(f"{head}.{stacked}.{leaf}")) is not None:
                before = sum(self._shapes[f"{head}.{other}.{leaf}"][0] for other in parts[: parts.index(part)])
                return whole[before : before + rows]
        raise EngineError(f"{name} cannot be compared: SGLang stores it in another form")

    # ---- the other process ----------------------------------------------------------------------------------------------

    def _call(self, operation: str, *arguments: object) -> None:
        self._tell(operation, *arguments)
        while (answer := self._receive())[0] not in ("done", "failed"):  # of a run that ended in an error
            pass
        kind, value = answer
        if kind == "failed":
            raise EngineError(f"SGLang answered: {value}")

    def _tell(self, *message: object) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise self._ended() from None

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            raise self._ended() from None

    def _ended(self) -> EngineError:
        self._run = _Run([], self._run.number)
        if self._connection.closed:
            return EngineError("the engine is closed")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip()
        self._broken = f"SGLang's process has ended with code {self._process.wait()}; make a new engine. Its last lines:\n{said[-2000:]}"
        return EngineError(self._broken)


def _start(arguments: dict[str, Any]) -> tuple[subprocess.Popen[bytes], Connection, IO[bytes]]:
    """In a session of its own: a Ctrl-C here is for us to deal with."""
    ours, theirs = socket.socketpair()
    log = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the engine
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHERS and not name.startswith("TORCHELASTIC")}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")) if path)
    command = [sys.executable, "-m", "hybrid_rl.engine.sglang_host", str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    connection = Connection(ours.detach())
    connection.send((bytes(multiprocessing.current_process().authkey), arguments))
    return process, connection, log


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()  # which it takes as the end
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()  # its children end with it
        process.wait()


def _checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    if not shapes or not all(math.prod(shape) for shape in shapes.values()):
        raise EngineError(f"{folder} has no weights in *.safetensors files")
    return shapes
