"""Phases of a step: how long each took and what it left in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch


def used_gib(device: torch.device) -> float:
    """Memory in use: the device's allocations on a GPU, this process's resident set on the CPU."""
    used = torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss
    return used / 2**30


class Phases:
    """`with phases("update"):` records `seconds["update"]` and `memory["update"]` (GiB in use when the phase ended)."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            self.memory[name] = used_gib(self.device)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())
