"""A run that is stopped and resumed on this device with deterministic=true gives the bits of one that was not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device import DEVICE
from tests.test_run import kill_when, run, run_folder, same, start

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["packed", "trees"])
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, dtype: str, layout: str) -> None:
    settings = [
        f"device={DEVICE.type}", "ranks=1", "engine.kind=local", "deterministic=true", f"policy.dtype={dtype}",
        f"policy.layout={layout}", "policy.offload=all", "rl.steps=4", "sft.steps=10",
    ]  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    run(whole, *settings)
    kill_when(start(killed, *settings), "step 3/4")
    run(killed, *settings, f"resume={run_folder(killed)}")
    same(whole, killed)
