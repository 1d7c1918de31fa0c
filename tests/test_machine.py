"""Cores and memory as the container gives them: control groups of either version, nested, by files made up here."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from hybrid_rl import machine

GIB = 2**30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """groups(lines of /proc/self/cgroup, {file: text}) → a machine of 64 GiB, 60 of them free, and 16 cores, in these control groups."""

    def groups(own: str, files: dict[str, str]) -> None:
        root, proc = tmp_path / "cgroup", tmp_path / "self"
        root.mkdir()
        proc.write_text(own)
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        monkeypatch.setattr(machine, "CGROUPS", root)
        monkeypatch.setattr(machine, "OWN_CGROUPS", proc)
        memory = psutil.virtual_memory()._replace(total=64 * GIB, available=60 * GIB)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))

    return groups


def used(limit: object, current: int, cached: int = 0, version: int = 2) -> dict[str, str]:
    names = ("memory.max", "memory.current", "inactive_file") if version == 2 else (
        "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")  # fmt: skip
    return {names[0]: f"{limit}\n", names[1]: f"{current}\n", "memory.stat": f"anon 5\n{names[2]} {cached}\nslab 7\n"}


def under(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


V1 = "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/\n"
MEMORY = {
    "none": ("0::/\n", {}, 64, 60),
    "a container's own root": ("0::/\n", used(8 * GIB, 3 * GIB), 8, 5),
    "cached files give way": ("0::/\n", used(8 * GIB, 7 * GIB, 2 * GIB), 8, 3),
    "no limit": ("0::/\n", used("max", 3 * GIB), 64, 60),
    "nested, the outer one is tighter": (
        "0::/slice/job\n", under("slice/job", used(32 * GIB, GIB)) | under("slice", used(16 * GIB, 14 * GIB)), 16, 2,
    ),
    "nested, the inner one is tighter": (
        "0::/slice/job\n", under("slice/job", used(4 * GIB, GIB)) | under("slice", used(16 * GIB, 2 * GIB)), 4, 3,
    ),
    "overdrawn": ("0::/\n", used(8 * GIB, 9 * GIB), 8, 0),
    "version 1": (V1, under("memory/docker/abc", used(8 * GIB, 6 * GIB, GIB, version=1)), 8, 3),
    "version 1, seen from inside": (V1, under("memory", used(8 * GIB, 6 * GIB, version=1)), 8, 2),
    "version 1 without a limit": (V1, under("memory", used(2**63 - 4096, GIB, version=1)), 64, 60),
    "the usage cannot be read": ("0::/\n", {"memory.max": f"{8 * GIB}\n"}, 8, 8),
}  # fmt: skip


@pytest.mark.parametrize("case", MEMORY)
def test_memory_is_what_the_tightest_group_leaves(groups, case: str) -> None:
    own, files, total, free = MEMORY[case]
    groups(own, files)
    assert (machine.total_memory() / GIB, machine.free_memory() / GIB) == (total, free)
    assert machine.machine()["memory_gib"] == total


CORES = {
    "none": ("0::/\n", {}, 16),
    "a quota": ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),
    "no quota": ("0::/\n", {"cpu.max": "max 100000\n"}, 16),
    "a part of a core is left": ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),
    "less than a core": ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
    "more than the machine": ("0::/\n", {"cpu.max": "6400000 100000\n"}, 16),
    "nested": ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
    "version 1": (V1, {"cpu/docker/abc/cpu.cfs_quota_us": "200000\n", "cpu/docker/abc/cpu.cfs_period_us": "100000\n"}, 2),
    "version 1 without a quota": (V1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 16),
}  # fmt: skip


@pytest.mark.parametrize("case", CORES)
def test_cores_are_those_of_the_quota(groups, case: str) -> None:
    own, files, expected = CORES[case]
    groups(own, files)
    assert machine.cores() == machine.machine()["cores"] == expected


def test_cores_are_those_of_the_affinity(groups, monkeypatch: pytest.MonkeyPatch) -> None:
    groups("0::/\n", {"cpu.max": "400000 100000\n"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert machine.cores() == 2


def test_a_machine_without_control_groups(groups, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    groups("0::/\n", {"cpu.max": "400000 100000\n"})
    monkeypatch.setattr(machine, "OWN_CGROUPS", tmp_path / "nowhere")
    assert (machine.cores(), machine.free_memory()) == (16, 60 * GIB)
