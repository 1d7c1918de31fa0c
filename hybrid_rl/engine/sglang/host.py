"""The process that owns `sglang.Engine`: it does what messages ask for, and ends when the process that started it ends.

SGLang expects a process of its own: it sets signal handlers, environment variables and the start method of processes,
kills every child when it shuts down, and kills the process that called it when its scheduler dies.

Messages in:
    ("generate", run, [(position, input ids, sampling parameters)…], prefixes)
        a prefix, (input ids, sampling parameters, positions), is computed before the requests at these positions begin
    ("abort", run)
    (operation, *arguments)                                 one of `_Host.operations`
Messages out:
    ("ready", facts) or ("failed", why)                     once, after the start
    ("progress", run)                                       at times, while the scheduler is at work
    ("computed", run, prompt tokens)                        for each prefix
    ("finished", run, position, ids, log-probabilities, facts) or ("refused", run, position, why)    for each request
    ("aborted", run)                                        when nothing runs any more
    ("done", None) or ("failed", why)                       for each operation
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil

from hybrid_rl.engine.sglang.interface import RunningEngine

IDLE_SECONDS = 60.0  # within which the scheduler must become idle after its last answer
PROGRESS_SECONDS = 0.5  # between two checks of whether the scheduler has answered
ORPHAN_SECONDS = 20.0  # for an orderly end after the process that started this one has ended
# facts of a request that never began
ABORTED = {"finish_reason": "abort", "prompt_tokens": 0, "cached_tokens": 0, "versions": []}


class _Host:
    def __init__(self, engine: RunningEngine, connection: Connection):
        self.engine, self.connection = engine, connection
        self.running: set[asyncio.Task[None]] = set()
        self.watching: asyncio.Task[None] | None = None
        self.aborting = False
        self.operations: dict[str, Callable[..., Awaitable[None]]] = {
            "release": self.release,
            "resume": engine.resume,
            "begin": engine.begin,
            "load": engine.load,
            "end": engine.end,
            "version": self.version,
            "flush": self.flush,
            "save": self.save,
        }

    async def serve(self) -> None:
        """Handle messages until the other side closes the connection."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                kind, *arguments = await loop.run_in_executor(None, self.connection.recv)
            except (EOFError, OSError):
                return
            if kind == "generate":
                run, requests, prefixes = arguments
                self.aborting, known = False, dict[int, asyncio.Task[None]]()
                if self.engine.reuses_prefixes:
                    for ids, parameters, positions in prefixes:
                        known |= dict.fromkeys(positions, loop.create_task(self.compute(run, ids, parameters)))
                self.running = {
                    loop.create_task(self.sample(run, i, ids, how, known.get(i))) for i, ids, how in requests
                }
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
        """Compute a shared prefix first: requests that arrive together would each compute it."""
        with suppress(Exception):  # its requests will then raise the same
            _, _, facts = await self.engine.generate(input_ids, parameters | {"max_new_tokens": 1})
            self.connection.send(("computed", run, facts["prompt_tokens"] - facts["cached_tokens"]))

    async def sample(
        self,
        run: int,
        position: int,
        input_ids: list[int],
        parameters: dict[str, Any],
        prefix: asyncio.Task[None] | None,
    ) -> None:
        """Sample one request, after its prefix, and send the result."""
        if prefix:
            await prefix
            if self.aborting:
                self.connection.send(("finished", run, position, [], [], ABORTED))
                return
        try:
            ids, logprobs, facts = await self.engine.generate(input_ids, parameters)
        except Exception as error:
            self.connection.send(("refused", run, position, str(error)))
            return
        self.connection.send(("finished", run, position, ids, logprobs, facts))

    async def watch(self, run: int, tasks: set[asyncio.Task[None]]) -> None:
        """Report progress while the scheduler answers, which it does every few dozen tokens of a completion."""
        heard = self.engine.heard
        while not all(task.done() for task in tasks):
            await asyncio.sleep(PROGRESS_SECONDS)
            if heard != (heard := self.engine.heard):
                self.connection.send(("progress", run))

    async def abort(self, run: int) -> None:
        self.aborting = True
        while self.running:  # repeat, since a request may still be on its way to the scheduler
            self.engine.abort()
            await asyncio.wait(self.running, timeout=0.1)
            self.running = {task for task in self.running if not task.done()}
        self.connection.send(("aborted", run))

    # ---- operations; they raise if SGLang refuses -------------------------------------------------------------------

    async def release(self, tags: list[str]) -> None:
        await self.flush()
        await self.engine.release(tags)

    async def version(self, version: int) -> None:
        """Drop what was computed under the old weights, and set the version of the new ones."""
        await self.flush()
        await self.engine.set_version(version)

    async def flush(self) -> None:
        """Drop computed prefixes once the scheduler is idle; it may still run a step after its last answer."""
        deadline = time.monotonic() + IDLE_SECONDS
        while not await self.engine.flush():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the scheduler is still busy after {IDLE_SECONDS} s")
            await asyncio.sleep(0.005)

    async def save(self, folder: str) -> None:
        self.engine.save(folder)


def _end_with(parent: int, ready: threading.Event) -> None:
    """Wait until the process that started this one has ended, allow an orderly end, then kill everything."""
    while os.getppid() == parent:
        time.sleep(0.5)
    deadline = time.monotonic() + (ORPHAN_SECONDS if ready.is_set() else 0)  # no wait while the engine still starts
    while time.monotonic() < deadline:
        time.sleep(0.5)
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(1)


def main() -> None:
    connection, ready = Connection(int(sys.argv[1])), threading.Event()
    threading.Thread(target=_end_with, args=(os.getppid(), ready), daemon=True).start()
    try:
        key, arguments = connection.recv()
    except (EOFError, OSError):
        return
    multiprocessing.current_process().authkey = key  # processes that share tensors must know the same key
    try:
        engine = RunningEngine(arguments)
    except Exception as error:
        traceback.print_exc()  # to the log
        connection.send(("failed", f"{type(error).__name__}: {error}"))
        return
    ready.set()
    connection.send(("ready", {"input": engine.input_limit, "tokens": engine.cache_tokens}))
    engine.loop.run_until_complete(_Host(engine, connection).serve())
    engine.shutdown()


if __name__ == "__main__":
    main()
