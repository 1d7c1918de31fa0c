"""Phases of a step: how long each took and what it found and left in memory; and memory that waits on the host."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import psutil
import torch
from torch import Tensor

from hybrid_rl import watch


def used_gib(device: torch.device) -> float:
    """Memory in use: the device's allocations on a GPU, this process's resident set on the CPU."""
    used = torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss
    return used / 2**30


def release_cached(device: torch.device) -> None:
    """What torch has freed but keeps goes back to the GPU: an engine in another process could not have it otherwise."""
    if device.type == "cuda":
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


class Phases:
    """`with phases("update"):` records `seconds["update"]` and `memory["update"]`, the GiB in use before and after."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, tuple[float, float]] = {}
        self._peak = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        before, start = used_gib(self.device), time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            with watch.phase(name):
                yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                self._peak = max(self._peak, torch.cuda.max_memory_allocated(self.device) / 2**30)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            self.memory[name] = (before, used_gib(self.device))

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def peak_gib(self) -> float:
        """The most that was held: within phases on a GPU, at their ends on the CPU."""
        return max(self._peak, *(gib for pair in self.memory.values() for gib in pair))


class Parked:
    """The contents of tensors, held in host memory while their own memory is given back; every view of them stays valid."""

    def __init__(self, tensors: Iterable[Tensor]):
        storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors) if s.size()}
        self._homes: list[tuple[torch.UntypedStorage, Tensor]] = []
        for storage in storages.values():
            host = torch.empty(storage.size(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
            self._homes.append((storage, host.copy_(_bytes(storage))))
            storage.resize_(0)

    def bring_back(self) -> None:
        for storage, host in self._homes:
            storage.resize_(len(host))
            _bytes(storage).copy_(host)
        self._homes.clear()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
