"""The ceilings: a copy on the device, a large product in bfloat16, copies between host and device."""

from __future__ import annotations

import torch

from benchmarks.gpu.measuring import LEADS, Bench


def main(bench: Bench) -> None:
    """Measure the rates that all predictions use."""
    _copy(bench)
    _product(bench)
    for pinned in (True, False):
        _host(bench, pinned)


def _copy(bench: Bench) -> None:
    size = 2**22 if bench.small else 2**32
    source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    rate = 2 * size / bench.seconds(lambda: target.copy_(source), repeats=10)
    bench.row("device copy", rate / 1e9, "GB/s", LEADS[bench.device.type]["copy"] / 1e9, "bytes read and written")


def _product(bench: Bench) -> None:
    n = 256 if bench.small else 8192
    one, other = (torch.randn(n, n, device=bench.device, dtype=bench.dtype) for _ in range(2))
    rate = 2 * n**3 / bench.seconds(lambda: one @ other, repeats=10, warm=3)
    lead = LEADS[bench.device.type]["product"]
    bench.row("product", rate / 1e12, "TFLOP/s", lead / 1e12, f"{n}³ in bfloat16, random numbers")


def _host(bench: Bench, pinned: bool) -> None:
    size = 2**20 if bench.small else 2**30
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned and bench.on_gpu)
    there = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    kind, lead = ("pinned", LEADS[bench.device.type]["host"] / 1e9) if pinned else ("pageable", None)
    to, back = (lambda: there.copy_(host, non_blocking=True)), (lambda: host.copy_(there, non_blocking=True))
    for way, copy in ((f"{kind} to device", to), (f"device to {kind}", back)):
        bench.row(way, size / bench.seconds(copy) / 1e9, "GB/s", lead)
