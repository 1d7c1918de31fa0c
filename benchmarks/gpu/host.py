"""What waits on the host: seconds to park and unpark tensors of 2 to 40 GiB, and to pin the memory they go to."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import Tensor

from benchmarks.gpu.measuring import GIB, Bench
from hybrid_rl.policy.offload import Offloaded


class Waiting(Offloaded):
    """Tensors of a layer's size."""

    def __init__(self, size: int, device: torch.device):
        self.tensors = [torch.randint(0, 255, (part,), dtype=torch.uint8, device=device) for part in _parts(size)]

    def waits(self) -> bool:
        return True

    def waiting(self) -> Iterable[Tensor]:
        return self.tensors


def _parts(size: int) -> list[int]:
    part = max(1, size // 37)
    return [part] * (size // part) + [size % part] * (size % part > 0)


def main(bench: Bench) -> None:
    """Park and unpark, and compare the bits."""
    for gib in (0.01,) if bench.small else (2, 8, 20, 40):
        size = int(gib * GIB)
        held = Waiting(size, bench.device)
        sums = [int(t[:: max(1, len(t) // 1000)].sum()) for t in held.tensors]
        rounds = []
        for _ in range(3):
            bench.wait()
            times = [time.perf_counter()]
            for step in (held.park, held.unpark):
                step()
                bench.wait()
                times.append(time.perf_counter())
            rounds.append((times[1] - times[0], times[2] - times[1]))
        first, (park, unpark) = rounds[0][0], rounds[-1]
        floor = size / bench.rate("host")
        bench.row(f"park {gib} GiB, first", first, "s", floor, "with the allocation of pinned memory")
        bench.row(f"park {gib} GiB", park, "s", floor)
        bench.row(f"unpark {gib} GiB", unpark, "s", floor)
        same = sums == [int(t[:: max(1, len(t) // 1000)].sum()) for t in held.tensors]
        bench.row(f"{gib} GiB came back", float(same), "yes", 1.0)
        del held
        if bench.on_gpu:
            torch.cuda.empty_cache()
            getattr(torch.accelerator, "empty_host_cache", lambda: None)()
