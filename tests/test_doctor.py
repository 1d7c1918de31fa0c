"""What the doctor says of a machine that is not as SGLang wants it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from hybrid_rl import doctor


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang and what it brings are there, as far as the doctor looks."""
    found = importlib.util.find_spec("json")
    brought = ("sglang", "sgl_kernel", "torch_memory_saver")
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, find=importlib.util.find_spec: found if name in brought else find(name)
    )


def by_name() -> dict[str, doctor.Check]:
    return {check.name: check for check in doctor.checks()}


@pytest.mark.parametrize(("scope", "fine"), [("0\n", True), ("1\n", False), (None, True)])
def test_ptrace_scope_is_named_with_the_command_that_changes_it(installed, monkeypatch, tmp_path: Path, scope, fine):
    if scope is not None:
        (tmp_path / "scope").write_text(scope)
    monkeypatch.setattr(doctor, "PTRACE", tmp_path / "scope")
    check = by_name()["ptrace_scope"]
    assert check.ok is fine
    assert "sudo sysctl kernel.yama.ptrace_scope=0" in check.fix
    assert check.optional


@pytest.mark.parametrize(
    ("variable", "value", "fine"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", False),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:True", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "", True),
    ],
)
def test_an_allocator_whose_memory_cannot_be_shared_is_named(installed, monkeypatch, variable, value, fine):
    monkeypatch.setenv(variable, value)
    assert by_name()["allocator"].ok is fine


def test_without_sglang_nobody_asks_for_what_it_needs(monkeypatch):
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, find=importlib.util.find_spec: None if name == "sglang" else find(name)
    )
    checks = by_name()
    assert not checks["SGLang"].ok
    assert checks["SGLang"].optional
    assert "ptrace_scope" not in checks


def test_what_sglang_compiles_its_kernels_with_is_looked_for(installed, monkeypatch, tmp_path: Path):
    there = {"nvcc": "/usr/bin/nvcc", "c++": "/usr/bin/c++", "ninja": "/usr/bin/ninja"}
    monkeypatch.setattr("shutil.which", there.get)
    assert by_name()["compilers"].ok
    del there["nvcc"]
    check = by_name()["compilers"]
    assert not check.ok
    assert check.found == "no nvcc"
    assert check.optional
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.31"))
    assert not by_name()["glibc"].ok
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.39"))
    assert by_name()["glibc"].ok


@pytest.mark.parametrize(("version", "fine"), [("580.159.03", True), ("575.57.08", False)])
def test_a_driver_that_is_too_old_is_named(installed, monkeypatch, tmp_path: Path, version: str, fine: bool):
    text = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (root@x)  Tue Jul 1\nGCC version: gcc 12.2.0\n"
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path / "version")
    check = by_name()["driver"]
    assert check.found == version
    assert check.ok is fine
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path / "nowhere")
    assert "driver" not in by_name()


def test_trackers_and_plugins_of_sweeps_are_listed_with_what_to_install(monkeypatch):
    def find(name: str, find=importlib.util.find_spec):
        if name.startswith("hydra_plugins."):
            raise ModuleNotFoundError("No module named 'hydra_plugins'")
        return None if name == "trackio" else find("json") if name == "wandb" else find(name)

    monkeypatch.setattr("importlib.util.find_spec", find)
    checks = by_name()
    assert checks["wandb"].ok
    assert checks["trackio"].fix == "optional, for tracker=trackio: pip install -e '.[trackers]'"
    assert checks["hydra-optuna-sweeper"].fix == "optional, for hydra/sweeper=optuna: pip install -e '.[sweeps]'"
    assert not any(checks[name].ok for name in ("trackio", "hydra-joblib-launcher", "hydra-submitit-launcher"))
    assert all(checks[name].optional for name in ("tensorboard", "wandb", "mlflow", "trackio", "hydra-optuna-sweeper"))
