"""The ranks of one run: who they are, and how they agree. Every rank runs the same program on the same facts.

A rank samples and scores its share of the requests, then all ranks hold all rollouts (`all_gather`), decide alike, and
train their share. Rank 0 writes files and speaks; what only it can know reaches the others by `from_main`.
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
    """This process among the `world` of the run, `local_world` of them on this node. All methods are collective:
    every rank calls them, in the same order. With one rank they are the identity and need no process group."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    group: dist.ProcessGroup | None = None  # of a team; None is all ranks of the run

    @property
    def main(self) -> bool:
        return self.rank == 0

    def share(self, count: int, team: int = 1) -> range:
        """This rank's contiguous part of `count` items; the parts differ by at most one item. Of a team, the first rank has it all."""
        place, parts = self.rank // team, self.world // team
        return range(0) if self.rank % team else range(count * place // parts, count * (place + 1) // parts)

    def team(self, size: int) -> Ranks:
        """This rank among its team of `size` neighbours, who agree among themselves; `size` divides the number of ranks."""
        if size == 1:
            return Ranks()
        groups = [
            dist.new_group(list(range(first, first + size)), backend="gloo", timeout=_patience)
            for first in range(0, self.world, size)
        ]
        return Ranks(self.rank % size, size, self.local_rank % size, size, groups[self.rank // size])

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order; anything that pickles."""
        if self.world == 1:
            return [value]
        gathered: list[Any] = [None] * self.world
        with hangs.waiting():
            dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def from_main(self, function: Callable[[], T]) -> T:
        """Rank 0 calls `function`; every rank gets its value, or raises its exception."""
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
        """Raises on every rank where at least one brings an error: its own there, the first one's elsewhere."""
        errors = [e for e in self.all_gather(error) if e is not None]
        if errors:
            raise error or _elsewhere(errors[0])

    def on_all(self, function: Callable[[], T]) -> T:
        """Every rank calls `function`; where one of them raises an error, all do."""
        error = None
        try:
            value = function()
        except Exception as raised:  # raised again below, on every rank
            error = raised
        self.agree(error)
        return value

    def largest(self, value: int) -> int:
        """The largest of all ranks' values."""
        if self.world == 1:
            return value
        found = torch.tensor(value)
        with hangs.waiting():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over ranks, in place."""
        if self.world > 1:
            with hangs.waiting():
                dist.all_reduce(values, group=self.group)
                if values.is_cuda:  # NCCL returns at once; whoever waits for the others should be known to wait
                    torch.cuda.current_stream().synchronize()
        return values

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Around all work of several ranks: the one that fails prints its traceback and ends at once, and with that the run.

        The others lose their connection to it, or were told of its error. That is no news: they leave it to the launcher to end
        them, and speak only where it does not.
        """
        try:
            yield
        except Exception as error:
            if self.world == 1:
                raise
            if (
                isinstance(error, dist.DistError)
                or "gloo" in str(error)
                or ELSEWHERE in getattr(error, "__notes__", ())
            ):
                _wait_for_the_end()
            print(f"hybrid_rl: rank {self.rank} failed\n{traceback.format_exc()}", end="", file=sys.stderr)
            _exit(1)

    def leave(self, code: int) -> int:
        """The end of the program: `code` with one rank. Of several, those of a run that was saved end together, and here."""
        if self.world == 1:
            return code
        if code in (0, *AT_A_SIGNAL):
            with suppress(RuntimeError):  # a rank that failed this late says so itself
                self.all_gather(None)
        _exit(code)


BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # gloo on GPUs too, for what ranks tell each other
GRACE = 5.0  # seconds that the launcher has to end a rank after another one failed
ELSEWHERE = "(raised on another rank)"


def _wait_for_the_end() -> None:
    """A launcher that ends this rank because of another one does it by a signal, which is no wish any more then."""
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline:
        if asked():
            _exit(128 + asked())
        time.sleep(0.05)


def _elsewhere(error: Exception) -> Exception:
    error.add_note(ELSEWHERE)
    return error


def _exit(code: int) -> NoReturn:
    """Without the destructors of process groups, which abort now and then when ranks end one after the other."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


_patience = timedelta(days=7)  # of a collective


def patient(group: dist.ProcessGroup) -> None:
    """A group that torch made gets the patience of the whole run's; its own would be ten minutes with NCCL, whatever is configured."""
    dist.distributed_c10d._set_pg_timeout(_patience, group)


def join(timeout: float, device: str = "auto") -> Ranks:
    """Join the ranks that the launcher started (environment variables of torchrun).

    Our launcher watches them (`watch`) and says more of one that hangs than a collective could, so collectives wait as long as it does.
    Under another launcher `timeout` s bound every wait for the others.
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
