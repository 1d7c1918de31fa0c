"""The ranks of one run: who they are, and how they agree. Every rank runs the same program on the same facts.

A rank samples and scores its share of the requests, then all ranks hold all rollouts (`all_gather`), decide alike, and
train their share. Rank 0 writes files and speaks; what only it can know reaches the others by `from_main`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the `world` of the run, `local_world` of them on this node. All methods are collective:
    every rank calls them, in the same order. With one rank they are the identity and need no process group."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @property
    def main(self) -> bool:
        return self.rank == 0

    def share(self, count: int) -> range:
        """This rank's contiguous part of `count` items; the parts of all ranks differ by at most one item."""
        return range(count * self.rank // self.world, count * (self.rank + 1) // self.world)

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order; anything that pickles."""
        if self.world == 1:
            return [value]
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, value)
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
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def agree(self, error: Exception | None = None) -> None:
        """Raises on every rank where at least one brings an error: its own there, the first one's elsewhere."""
        errors = [e for e in self.all_gather(error) if e is not None]
        if errors:
            raise error or errors[0]

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values


def launched() -> bool:
    """Whether torchrun, accelerate or another launcher started this process as one rank of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def join(timeout: float) -> Ranks:
    """Join the ranks that the launcher started (environment variables of torchrun); `timeout` s bound every later wait for the others."""
    if not launched():
        return Ranks()
    ranks = Ranks(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(ranks.local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=timedelta(seconds=timeout))
    return ranks
