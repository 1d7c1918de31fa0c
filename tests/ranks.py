"""Runs a function on several ranks, over gloo or on GPUs over NCCL: `on_ranks(3, function, arguments…)` gives what each rank returned.

Workers are forked from a server process that has imported the heavy packages once, so that a run costs a moment.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_rl.processes.ranks import BACKENDS, Ranks
from tests import forked
from tests.device import DEVICE, ON_GPU

TIMEOUT = (
    60.0  # seconds that a rank waits for the others, and the caller for all of them, where a test does not say more
)

# a process that was forked from one in which a library has looked for GPUs could not use them
context: Any = multiprocessing.get_context("spawn") if ON_GPU else forked.context
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any, timeout: float = TIMEOUT) -> list[Any]:
    """[function(ranks, *arguments) of each rank]. Raises AssertionError with the first rank's traceback where one fails or hangs.

    On GPUs each rank has one of its own; a test that wants more ranks than there are is skipped.
    """
    if ON_GPU and world > torch.cuda.device_count():
        pytest.skip(f"{world} ranks need as many GPUs, and there are {torch.cuda.device_count()}")
    with TemporaryDirectory() as folder:
        pipes: list[tuple[Connection, Connection]] = [context.Pipe(duplex=False) for _ in range(world)]
        store = str(Path(folder) / "store")
        workers = [
            context.Process(
                target=_worker, args=(Ranks(r, world, r, world), store, timeout, pipes[r][1], function, arguments)
            )
            for r in range(world)
        ]
        try:
            for worker in workers:
                worker.start()
            for _, sender in pipes:
                sender.close()
            results: list[Any] = [None] * world
            open_ = {receiver: r for r, (receiver, _) in enumerate(pipes)}
            while open_:
                ready = wait(list(open_), timeout=timeout + 30)
                assert ready, f"ranks {sorted(open_.values())} hang"
                for receiver in ready:
                    rank = open_.pop(receiver)  # type: ignore[arg-type]
                    try:
                        ok, results[rank] = pickle.loads(receiver.recv_bytes())  # type: ignore[union-attr]  # noqa: S301
                    except EOFError:
                        ok, results[rank] = False, "it died without a word"
                    assert ok, f"rank {rank}: {results[rank]}"
            return results
        finally:
            for worker in workers:
                worker.kill()
                worker.join(10)


def _worker(
    ranks: Ranks, store: str, timeout: float, sender: Connection, function: Callable[..., Any], arguments: tuple
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    try:
        if ON_GPU:
            torch.cuda.set_device(ranks.rank)
        dist.init_process_group(
            BACKENDS[DEVICE.type],
            store=dist.FileStore(store, ranks.world),
            rank=ranks.rank,
            world_size=ranks.world,
            timeout=timedelta(seconds=timeout),
        )
        result = (True, function(ranks, *arguments))
        dist.barrier()
    except BaseException:
        result = (False, traceback.format_exc())
    sender.send_bytes(
        pickle.dumps(result)
    )  # and not send(), which shares the memory of tensors with a process that is about to end
    sender.close()
    os._exit(0)  # without gloo's own shutdown, which now and then aborts
