"""What replaces CUDA's running sums with deterministic=true."""

from __future__ import annotations

import pytest
import torch

from hybrid_rl.algo.sums import BLOCK, cumsum_by_products


@pytest.mark.parametrize("shape", [(1,), (7,), (BLOCK,), (BLOCK + 1,), (5, 3 * BLOCK + 17), (2, 151_936)])
def test_running_sums_by_products(shape: tuple[int, ...]):
    values = torch.rand(shape, generator=torch.Generator().manual_seed(0)) / shape[-1]
    torch.testing.assert_close(cumsum_by_products(values).double(), values.double().cumsum(-1), rtol=1e-5, atol=1e-6)
