"""Report facts about this machine and its software: versions, cores, memory, GPUs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python and packages; `source` is a checksum (CRC-32) over hybrid_rl's files."""
    packages = ("torch", "transformers", "tokenizers", "accelerate", "hydra-core", "safetensors", "numpy")
    found = {
        name: importlib.metadata.version(name)
        for name in packages
        if importlib.util.find_spec(name.replace("hydra-core", "hydra"))
    }
    from hybrid_rl import __version__

    source = 0
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        source = zlib.crc32(file.read_bytes(), source)
    return {"python": platform.python_version(), "hybrid_rl": __version__, "source": f"{source:08x}", **found}


def git_state() -> dict[str, Any] | None:
    """Return commit and dirty (whether tracked files differ from it) of the repository around the current directory.

    Outside of any, those of the repository that hybrid_rl lies in; None if there is none, or no git.
    """
    for folder in (Path(), Path(__file__).parent):
        with suppress(OSError, subprocess.SubprocessError):
            commit = _git(folder, "rev-parse", "HEAD").strip()
            return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}
    return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout


def machine() -> dict[str, Any]:
    """Return cpu (its name), cores, memory_gib, and gpu: the GPUs that torch sees, or None."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    gpu = f"{len(gpus)} × {gpus[0]}" if gpus else None
    return {"cpu": _cpu_name(), "cores": cores(), "memory_gib": total_memory() / 2**30, "gpu": gpu}


def cores() -> int:
    """Return the number of CPU cores that this process may use, by its affinity and its container's CPU quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroups("cpu"):
        words = _words(folder / "cpu.max") or _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(words) == 2 and all(word.isdecimal() for word in words):  # "max" and -1: no limit
            allowed = min(allowed, int(words[0]) // max(1, int(words[1])))
    return max(1, allowed)


def total_memory() -> int:
    """Return the bytes of memory of this machine, or the limit of its container if that is smaller."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _memory_limits())])


def free_memory() -> int:
    """Return the bytes of memory that are still available on this machine and in its container."""
    return min([psutil.virtual_memory().available, *(max(0, limit - used) for limit, used in _memory_limits())])


CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield (limit, used) in bytes of each control group around this process that has a limit.

    Inactive cached files, which the kernel can drop, do not count as used.
    """
    for folder in _cgroups("memory"):
        limit, used = (
            next((int(w) for w in (*_words(folder / new), *_words(folder / old)) if w.isdecimal()), None)
            for new, old in (("memory.max", "memory.limit_in_bytes"), ("memory.current", "memory.usage_in_bytes"))
        )
        if limit is not None:
            words = _words(folder / "memory.stat")
            statistics = dict(zip(words[::2], words[1::2], strict=False))
            cached = int(statistics.get("total_inactive_file", statistics.get("inactive_file", "0")))
            yield limit, max(0, (used or 0) - cached)


def _cgroups(controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups that limit this process, the innermost first.

    These are the groups of version 2, and those of `controller` in version 1. psutil does not read control groups.
    """
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUPS / controller if controllers else CGROUPS
        inside = root / path.strip("/")  # a container may see the path on the host here, and its own group as the root
        yield from (folder for folder in (inside, *inside.parents) if folder.is_relative_to(root) and folder.is_dir())


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
