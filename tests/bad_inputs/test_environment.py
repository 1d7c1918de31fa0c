"""The surroundings of a run: a launcher's variables, a port that is taken, folders that cannot be written to, a full disk."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_rl.model_folder.read import ModelError
from hybrid_rl.policy.model import pick_device
from hybrid_rl.processes.launch import environment_problem
from tests.bad_inputs.conftest import SMALL

LAUNCHER = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TWO = {
    "WORLD_SIZE": "2",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}

VARIABLES = {
    "no world": ({"RANK": "0"}, "RANK is set and WORLD_SIZE is not: start ranks with torchrun, or unset RANK"),
    "a world in words": ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two: must be a whole number of at least 0"),
    "an empty world": ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: must be at least 1"),
    "a negative world": ({"WORLD_SIZE": "-2"}, "WORLD_SIZE=-2: must be a whole number of at least 0"),
    "only the world": ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set and RANK is not: start ranks with torchrun, or unset WORLD_SIZE"),
    "no local world": ({**TWO, "LOCAL_WORLD_SIZE": ""}, "WORLD_SIZE=2 is set and LOCAL_WORLD_SIZE is not: start ranks with torchrun, or unset WORLD_SIZE"),
    "no address": ({**TWO, "MASTER_ADDR": ""}, "WORLD_SIZE=2 is set and MASTER_ADDR is not: start ranks with torchrun, or unset WORLD_SIZE"),
    "no port": ({**TWO, "MASTER_PORT": ""}, "WORLD_SIZE=2 is set and MASTER_PORT is not: start ranks with torchrun, or unset WORLD_SIZE"),
    "a port in words": ({**TWO, "MASTER_PORT": "any"}, "MASTER_PORT=any: must be a whole number of at least 0"),
    "a rank outside": ({**TWO, "RANK": "2"}, "RANK=2: must be at least 0 and below WORLD_SIZE=2"),
    "a local rank outside": ({**TWO, "LOCAL_RANK": "3"}, "LOCAL_RANK=3: must be at least 0 and below LOCAL_WORLD_SIZE=2"),
    "two ranks": (TWO, ""),
    "one rank": ({"WORLD_SIZE": "1", "RANK": "0"}, ""),
    "none": ({}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIABLES)
def test_a_launchers_variables(name, monkeypatch):
    variables, expected = VARIABLES[name]
    for variable in LAUNCHER:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert environment_problem() == expected


def command(folder: Path, *overrides: str, **variables: str) -> tuple[int, str]:
    """Exit code and all that a small run says."""
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    result = subprocess.run(
        [sys.executable, "-m", "hybrid_rl.run", *SMALL, *overrides],
        cwd=folder, env={**clean, "OMP_NUM_THREADS": "1", **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
    )  # fmt: skip
    return result.returncode, result.stdout


def test_a_world_without_a_port_ends_the_command(tmp_path):
    code, output = command(tmp_path, WORLD_SIZE="2", RANK="0")
    assert (code, output) == (
        2,
        "hybrid_rl: WORLD_SIZE=2 is set and LOCAL_RANK is not: start ranks with torchrun, or unset WORLD_SIZE\n",
    )


def test_a_port_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output = command(tmp_path, **{**TWO, "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": str(port)})
    assert code == 2
    (line,) = (line for line in output.splitlines() if line.startswith("hybrid_rl: "))
    assert line.startswith(f"hybrid_rl: MASTER_ADDR=127.0.0.1 MASTER_PORT={port}: the ranks cannot meet there: ")
    assert "EADDRINUSE" in line
    assert "Traceback" not in output


@pytest.mark.slow
def test_variables_of_other_libraries_do_no_harm(tmp_path):
    code, output = command(
        tmp_path, "dry_run=true", "device=auto", OMP_NUM_THREADS="abc", CUDA_VISIBLE_DEVICES="nonsense"
    )
    assert code == 0, output
    assert "ranks      1 (cpu)" in output


def test_a_gpu_that_the_environment_hides(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "nonsense")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(
        ModelError,
        match=r"^device=cuda, but torch sees no GPU \(CUDA_VISIBLE_DEVICES='nonsense'\); use device=cpu or device=auto$",
    ):
        pick_device("cuda")


@pytest.mark.parametrize(
    ("given", "reason"), [("file", "{0}/file is a file"), ("file/below", "{0}/file is a file"), ("/proc/nothing", "cannot be written to: No such file or directory"), ("x" * 300, "cannot be written to: File name too long")]
)  # fmt: skip
def test_an_output_folder_that_cannot_be(tmp_path, given, reason):
    (tmp_path / "file").touch()
    code, output = command(tmp_path, f"output_dir={given}")
    assert code == 2
    assert output == f"hybrid_rl: output_dir={given}: {reason.format(tmp_path)}; choose another folder\n"


FULL = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
sys.argv = ["hybrid_rl.run", *{arguments!r}]
runpy.run_module("hybrid_rl.run", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [100, 20_000, 300_000], ids=["configuration", "base model", "checkpoint"])
def test_a_disk_that_is_full(tmp_path, size):
    """Files that may not grow beyond a size behave as on a full disk: the write fails."""
    program = FULL.format(
        size=size,
        arguments=[*SMALL, "rollout.max_prompt_tokens=200", "data.max_length=12", "model.tiny.hidden_size=64"],
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    line = result.stdout.splitlines()[-1]
    assert line.startswith("hybrid_rl: ")
    assert "File too large" in line
    assert "Traceback" not in result.stdout + result.stderr
