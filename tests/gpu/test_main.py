"""The command that runs the tests of a GPU, on a machine without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu"], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("test-gpu: no GPU (torch ")
    assert line.endswith("; nothing was tested")
