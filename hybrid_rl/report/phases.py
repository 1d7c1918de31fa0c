"""Measure the phases of a step: seconds, and the memory in use before and after."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from hybrid_rl.processes import hangs


def used_gib(device: torch.device) -> float:
    """Return the GiB in use: torch's allocations on a GPU, the resident set of this process on the CPU."""
    used = torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss
    return used / 2**30


class Phases:
    """A timer: `with phases("update"):` adds to seconds["update"] and sets memory["update"], GiB before and after."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, tuple[float, float]] = {}
        self._peak = 0.0
        self.reserved_gib: float | None = None  # most that torch held, free blocks included; None on the CPU
        self.device_gib: float | None = None  # most that all processes held together at the ends of phases

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        before, start = used_gib(self.device), time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            with hangs.phase(name):
                yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                self._peak = max(self._peak, torch.cuda.max_memory_allocated(self.device) / 2**30)
                free, total = torch.cuda.mem_get_info(self.device)
                reserved = torch.cuda.max_memory_reserved(self.device) / 2**30
                self.reserved_gib = max(self.reserved_gib or 0.0, reserved)
                self.device_gib = max(self.device_gib or 0.0, (total - free) / 2**30)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            self.memory[name] = (before, used_gib(self.device))

    @property
    def total(self) -> float:
        """Return the seconds of all phases together."""
        return sum(self.seconds.values())

    @property
    def peak_gib(self) -> float:
        """Return the peak memory in GiB: within phases on a GPU, at their beginnings and ends on the CPU."""
        return max(self._peak, *(gib for pair in self.memory.values() for gib in pair))
