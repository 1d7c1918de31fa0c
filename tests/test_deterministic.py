"""deterministic=true: two processes, the same bits; and what replaces CUDA's running sums."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybrid_rl.deterministic import BLOCK, cumsum_by_products
from tests.test_run import run, same

FEW = ["sft.steps=6", "rl.steps=3", "rl.eval_every=0", "deterministic=true", "reward._target_=tests.rewards.by_hash"]


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_processes_give_the_same_bits(tmp_path: Path, threads: int):
    """The reward is Python's hash of a text, which differs from process to process unless that is seen to."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        run(folder, *FEW, f"threads={threads}")
    same(*folders)


@pytest.mark.parametrize("shape", [(1,), (7,), (BLOCK,), (BLOCK + 1,), (5, 3 * BLOCK + 17), (2, 151_936)])
def test_running_sums_by_products(shape: tuple[int, ...]):
    values = torch.rand(shape, generator=torch.Generator().manual_seed(0)) / shape[-1]
    torch.testing.assert_close(cumsum_by_products(values).double(), values.double().cumsum(-1), rtol=1e-5, atol=1e-6)
