"""Facts about this machine and its software: versions, cores, memory, GPUs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import psutil


@cache
def versions() -> dict[str, str]:
    """What a run's numbers depend on beside its settings; `source` is a checksum over hybrid_rl's own files."""
    packages = ("torch", "transformers", "tokenizers", "accelerate", "hydra-core", "safetensors", "numpy")
    found = {name: importlib.metadata.version(name) for name in packages if importlib.util.find_spec(name.replace("hydra-core", "hydra"))}
    from hybrid_rl import __version__

    source = 0
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        source = zlib.crc32(file.read_bytes(), source)
    return {"python": platform.python_version(), "hybrid_rl": __version__, "source": f"{source:08x}", **found}


def machine() -> dict[str, Any]:
    """Facts about this machine: cpu, cores, memory_gib, and the GPUs torch sees (or None)."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    gpu = f"{len(gpus)} × {gpus[0]}" if gpus else None
    return {"cpu": _cpu_name(), "cores": cores(), "memory_gib": psutil.virtual_memory().total / 2**30, "gpu": gpu}


def cores() -> int:
    """CPU cores this process may use (fewer than the machine's in a container or under taskset)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
