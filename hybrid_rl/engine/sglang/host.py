"""The process that owns `sglang.Engine`: it does what messages ask for and ends with whoever started it.

SGLang expects a process of its own: it sets signal handlers, environment variables and the start method of processes, kills
every child when it shuts down, and kills the process that called it when its scheduler dies. Here that harms nobody.

Messages in: ("generate", run, [(position, input ids, sampling parameters)…], prefixes), ("abort", run), (operation, *arguments) of `_Host.operations`.
A prefix, (input ids, sampling parameters, positions), is computed before the requests at these positions begin.
Messages out: ("ready", facts) or ("failed", why) once; ("progress", run) at times while the scheduler is at work; ("computed", run, number
of prompt tokens) for each prefix; ("finished", run, position, ids, log-probabilities, facts) or
("refused", run, position, why) for each request; ("aborted", run) when nothing runs any more; ("done", None) or ("failed", why) for each operation.
"""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

IDLE_SECONDS = 60.0  # that the scheduler has to become idle after its last answer
PROGRESS_SECONDS = 0.5  # between two looks at whether it has said anything
ORPHAN_SECONDS = 20.0  # to end in order after whoever started this process has gone


class _Host:
    def __init__(self, engine: Any, connection: Connection):
        self.engine, self.manager, self.connection = engine, engine.tokenizer_manager, connection
        self.running: set[asyncio.Task[None]] = set()
        self.watching: asyncio.Task[None] | None = None
        self.aborting = False
        self.operations: dict[str, Callable[..., Awaitable[None]]] = {
            "release": self.release, "resume": self.resume, "begin": self.begin, "load": self.load, "end": self.end, "version": self.version,
            "flush": self.flush, "save": self.save,
        }  # fmt: skip

    async def serve(self) -> None:
        """Until the other side closes the connection."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                kind, *arguments = await loop.run_in_executor(None, self.connection.recv)
            except (EOFError, OSError):
                return
            if kind == "generate":
                run, requests, prefixes = arguments
                self.aborting, known = False, dict[int, asyncio.Task[None]]()
                if not self.engine.server_args.disable_radix_cache:
                    for ids, parameters, positions in prefixes:
                        known |= dict.fromkeys(positions, loop.create_task(self.compute(run, ids, parameters)))
                self.running = {loop.create_task(self.sample(run, i, ids, how, known.get(i))) for i, ids, how in requests}
                self.watching = loop.create_task(self.watch(run, self.running))
            elif kind == "abort":
                await self.abort(*arguments)
            else:
                try:
                    await self.operations[kind](*arguments)
                    self.connection.send(("done", None))
                except Exception as error:
                    self.connection.send(("failed", f"{kind}: {error}"))

    async def compute(self, run: int, input_ids: list[int], parameters: dict[str, Any]) -> None:
        """Requests that come at once would each compute the prefix that they share."""
        with suppress(Exception):  # what is wrong with it they will say
            out = await self.engine.async_generate(input_ids=input_ids, sampling_params=parameters | {"max_new_tokens": 1})
            facts = out["meta_info"]
            self.connection.send(("computed", run, facts["prompt_tokens"] - facts["cached_tokens"]))

    async def sample(
        self, run: int, position: int, input_ids: list[int], parameters: dict[str, Any], prefix: asyncio.Task[None] | None
    ) -> None:  # fmt: skip
        if prefix:
            await prefix
            if self.aborting:
                self.connection.send(("finished", run, position, [], [], {"finish_reason": {"type": "abort"}}))
                return
        try:
            out = await self.engine.async_generate(input_ids=input_ids, sampling_params=parameters, return_logprob=True)
        except Exception as error:
            self.connection.send(("refused", run, position, str(error)))
            return
        facts, ids = out["meta_info"], out["output_ids"]
        logprobs = [entry[0] for entry in facts.get("output_token_logprobs") or []]
        wanted = ("finish_reason", "prompt_tokens", "cached_tokens", "weight_versions")
        self.connection.send(("finished", run, position, list(ids), logprobs, {name: facts[name] for name in wanted if name in facts}))

    async def watch(self, run: int, tasks: set[asyncio.Task[None]]) -> None:
        """The scheduler speaks every few dozen tokens of a completion: while it does, nobody has to worry about long ones."""
        heard = self.manager.last_receive_tstamp
        while not all(task.done() for task in tasks):
            await asyncio.sleep(PROGRESS_SECONDS)
            if heard != (heard := self.manager.last_receive_tstamp):
                self.connection.send(("progress", run))

    async def abort(self, run: int) -> None:
        self.aborting = True
        while self.running:  # again, since a request may be on its way to the scheduler
            self.manager.abort_request(abort_all=True)
            await asyncio.wait(self.running, timeout=0.1)
            self.running = {task for task in self.running if not task.done()}
        self.connection.send(("aborted", run))

    # ---- operations: a wrong answer raises -------------------------------------------------------------------------------

    async def release(self, tags: list[str]) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self.flush()
        await self.manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags), None)

    async def resume(self, tags: list[str]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self.manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags), None)

    async def begin(self) -> None:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        _check(await self.manager.begin_weight_update(BeginWeightUpdateReqInput(), None))

    async def load(self, payloads: list[bytes]) -> None:
        """One flattened bucket, serialized by each tensor-parallel rank."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=payloads, load_format="flattened_bucket", flush_cache=False)
        _check(await self.manager.update_weights_from_tensor(request, None))

    async def end(self) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        _check(await self.manager.end_weight_update(EndWeightUpdateReqInput(), None))

    async def version(self, version: int) -> None:
        """Forget what was computed under the weights before, and name those that are there now."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        await self.flush()
        await self.manager.update_weight_version(UpdateWeightVersionReqInput(new_version=str(version)))

    async def flush(self) -> None:
        """Forget computed prefixes, once the scheduler is idle: it may be a step ahead of the last request that it answered."""
        deadline = time.monotonic() + IDLE_SECONDS
        while not (await self.manager.flush_cache()).success:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the scheduler is still busy after {IDLE_SECONDS} s")
            await asyncio.sleep(0.005)

    async def save(self, folder: str) -> None:
        """The weights as safetensors, by SGLang's names."""
        self.engine.save_sharded_model(path=folder, pattern=None, max_size=None)


def _check(answer: Sequence[Any]) -> None:
    if not answer[0]:
        raise RuntimeError(str(answer[1]))


def _start(arguments: dict[str, Any]) -> Any:
    """`sglang.Engine` with these arguments. Raises RuntimeError naming what the installed version does not know."""
    import sglang
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
    from sglang.srt.server_args import ServerArgs

    installed = f"SGLang {sglang.__version__}"
    if not hasattr(sglang.Engine, "begin_weight_update"):
        raise RuntimeError(f"{installed} is too old; 0.5.21 or newer is needed")
    if unknown := sorted(arguments.keys() - inspect.signature(ServerArgs).parameters.keys()):
        raise RuntimeError(f"{installed} has no argument {', '.join(unknown)} (engine.arguments)")
    if unknown := sorted({"kv_cache", "weights"} - set(GPU_MEMORY_ALL_TYPES)):
        raise RuntimeError(f"{installed} cannot give back memory tagged {', '.join(unknown)}, only {', '.join(GPU_MEMORY_ALL_TYPES)}")
    return sglang.Engine(**arguments)


def _leaves(engine: Any) -> list[str]:
    """Files in shared memory that SGLang makes and never removes."""
    with suppress(ImportError, AttributeError):
        from sglang.srt.managers.load_snapshot import shm_path_for

        return [shm_path_for(engine.port_args.instance_id)]
    return []


def _end_with(parent: int, leaves: list[str]) -> None:
    """Where the process that started this one is gone: the end in order gets its time, then everything ends."""
    while os.getppid() == parent:
        time.sleep(0.5)
    deadline = time.monotonic() + (ORPHAN_SECONDS if leaves else 0)  # none while it still starts
    while time.monotonic() < deadline:
        time.sleep(0.5)
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    _remove(leaves)
    os._exit(1)


def _remove(paths: list[str]) -> None:
    for path in paths:
        Path(path).unlink(missing_ok=True)


def main() -> None:
    connection, leaves = Connection(int(sys.argv[1])), list[str]()
    threading.Thread(target=_end_with, args=(os.getppid(), leaves), daemon=True).start()
    try:
        key, arguments = connection.recv()
    except (EOFError, OSError):
        return
    multiprocessing.current_process().authkey = key  # tensors are shared by those who know it
    try:
        engine = _start(arguments)
    except Exception as error:
        connection.send(("failed", f"{type(error).__name__}: {error}"))
        return
    leaves += _leaves(engine)
    info = engine._scheduler_init_result.scheduler_infos[0]
    connection.send(("ready", {"input": info["max_req_input_len"], "tokens": info["max_total_num_tokens"], "leaves": leaves}))
    engine.loop.run_until_complete(_Host(engine, connection).serve())
    engine.shutdown()
    _remove(leaves)


if __name__ == "__main__":
    main()
