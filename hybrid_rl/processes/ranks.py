"""The ranks of a run and their collectives. Every rank runs the same program on the same data.

Each rank samples and scores its share of the requests; then all ranks exchange all rollouts (`all_gather`), take the
same decisions, and train on their share. Rank 0 writes files and prints; `from_main` sends its results to the other
ranks.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_rl.config import ConfigError
from hybrid_rl.processes import hangs
from hybrid_rl.processes.launch import AT_A_SIGNAL, launched
from hybrid_rl.processes.signals import asked

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the `world` ranks of the run, `local_world` of them on this node.

    Methods that communicate are collective: every rank calls them, in the same order. With one rank they return their
    input and need no process group.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    group: dist.ProcessGroup | None = None  # the group of a team; None: all ranks of the run

    @property
    def main(self) -> bool:
        """Return whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def share(self, count: int, team: int = 1) -> range:
        """Return this rank's contiguous part of `count` items; parts differ in size by at most one.

        In teams of `team` ranks, the first rank of a team has the part of the whole team.
        """
        place, parts = self.rank // team, self.world // team
        return range(0) if self.rank % team else range(count * place // parts, count * (place + 1) // parts)

    def team(self, size: int) -> Ranks:
        """Return this rank within its team of `size` neighbours, which has its own group; `size` divides `world`."""
        if size == 1:
            return Ranks()
        groups = [
            dist.new_group(list(range(first, first + size)), backend="gloo", timeout=_patience)
            for first in range(0, self.world, size)
        ]
        return Ranks(self.rank % size, size, self.local_rank % size, size, groups[self.rank // size])

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order. `value` may be anything that can be pickled."""
        if self.world == 1:
            return [value]
        gathered: list[Any] = [None] * self.world
        with hangs.waiting():
            dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def from_main(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0; return its value, or raise its exception, on every rank."""
        if self.world == 1:
            return function()
        outcome: list[Any] = [None, None]
        if self.main:
            try:
                outcome[0] = function()
            except Exception as error:  # raised again below, on every rank
                outcome[1] = error
        with hangs.waiting():
            dist.broadcast_object_list(outcome, group=self.group, group_src=0)
        if outcome[1] is not None:
            raise outcome[1] if self.main else _elsewhere(outcome[1])
        return outcome[0]

    def agree(self, error: Exception | None = None) -> None:
        """Raise on every rank if at least one passes an error: that rank its own, the others the first one."""
        errors = [e for e in self.all_gather(error) if e is not None]
        if errors:
            raise error or _elsewhere(errors[0])

    def on_all(self, function: Callable[[], T]) -> T:
        """Call `function` on every rank and return its value; if it raises on one rank, raise on all."""
        error = None
        try:
            value = function()
        except Exception as raised:  # raised again below, on every rank
            error = raised
        self.agree(error)
        return value

    def largest(self, value: int) -> int:
        """Return the largest value over all ranks."""
        if self.world == 1:
            return value
        found = torch.tensor(value)
        with hangs.waiting():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def sum(self, values: Tensor) -> Tensor:
        """Sum `values` element-wise over ranks, in place, and return them."""
        if self.world > 1:
            with hangs.waiting():
                dist.all_reduce(values, group=self.group)
                if values.is_cuda:  # NCCL returns at once; wait here, so that the record says that this rank waits
                    torch.cuda.current_stream().synchronize()
        return values

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Print the traceback and end this process when the work inside the context fails on one of several ranks.

        The other ranks then lose their connection, or receive the error by a collective. They print nothing and wait
        for the launcher to end them; only if it does not, they print their own traceback and end.
        """
        try:
            yield
        except Exception as error:
            if self.world == 1:
                raise
            lost = isinstance(error, dist.DistError) or "gloo" in str(error)
            if lost or ELSEWHERE in getattr(error, "__notes__", ()):
                _wait_for_launcher()
            print(f"hybrid_rl: rank {self.rank} failed\n{traceback.format_exc()}", end="", file=sys.stderr)
            _exit(1)

    def leave(self, code: int) -> int:
        """Return `code` with one rank; with several, end this process with it.

        After a success or a graceful stop, ranks wait for each other before they end.
        """
        if self.world == 1:
            return code
        if code in (0, *AT_A_SIGNAL):
            with suppress(RuntimeError):  # a rank that fails this late prints its error itself
                self.all_gather(None)
        _exit(code)


BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # with GPUs too, objects and CPU tensors travel over gloo
GRACE = 5.0  # seconds that the launcher has to end a rank after another one failed
ELSEWHERE = "(raised on another rank)"


def _wait_for_launcher() -> None:
    """Wait up to GRACE seconds for the launcher to end this rank after another rank failed.

    A launcher may do that with SIGTERM: it then ends the process at once and requests no graceful stop.
    """
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline:
        if asked():
            _exit(128 + asked())
        time.sleep(0.05)


def _elsewhere(error: Exception) -> Exception:
    error.add_note(ELSEWHERE)
    return error


def _exit(code: int) -> NoReturn:
    """End this process without running the destructors of process groups, which sometimes abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


_patience = timedelta(days=7)  # timeout of collectives


def patient(group: dist.ProcessGroup) -> None:
    """Set the timeout of a group that torch created to that of the run; NCCL's default would be ten minutes."""
    dist.distributed_c10d._set_pg_timeout(_patience, group)


def join(timeout: float, device: str = "auto") -> Ranks:
    """Join the ranks that the launcher started (torchrun's environment variables); return this rank.

    hybrid_rl's launcher detects hangs and reports more than a timeout of a collective would, so collectives wait for
    days. Under another launcher every collective times out after `timeout` seconds. Raises ConfigError if the ranks
    cannot meet.
    """
    global _patience
    if not launched():
        return Ranks()
    rank, world, local_rank, local_world = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    ranks = Ranks(rank, world, local_rank, local_world)
    gpu = device != "cpu" and torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(ranks.local_rank)
    if hangs.NOTES not in os.environ:
        _patience = timedelta(seconds=timeout)
    try:
        dist.init_process_group(BACKENDS["cuda" if gpu else "cpu"], timeout=_patience)
    except (dist.DistError, ValueError) as error:
        meeting = f"MASTER_ADDR={os.environ['MASTER_ADDR']} MASTER_PORT={os.environ['MASTER_PORT']}"
        raise ConfigError(f"{meeting}: the ranks cannot meet there: {' '.join(str(error).split())}") from error
    return ranks
