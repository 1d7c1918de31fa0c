"""The command that runs the tests of a GPU, on a machine without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_checkout_runs_without_being_installed() -> None:
    """With a system's Python: conf/ and recipes/ lie beside the package, and nothing maps them into it."""
    what = (
        "import importlib.util as u; print(*(u.find_spec('hybrid_rl.' + n).origin for n in ('run', 'recipes.reverse')))"
    )
    found = subprocess.run(
        [sys.executable, "-S", "-c", what], cwd="/", capture_output=True, text=True, timeout=60, check=True,
        env={"PYTHONPATH": str(ROOT)},
    ).stdout.split()  # fmt: skip
    assert found == [str(ROOT / "hybrid_rl" / "run.py"), str(ROOT / "recipes" / "reverse" / "__init__.py")]


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu"], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("test-gpu: no GPU (torch ")
    assert line.endswith("; nothing was tested")
