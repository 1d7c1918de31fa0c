"""The device of the tests that are marked `gpu`: the variable TEST_DEVICE chooses it, cpu by default.

`make test-gpu` sets it to cuda and runs exactly these tests. Their expected values come from the CPU in any case.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from hybrid_rl.config import PolicyConfig, Precision

DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cpu"))
ON_GPU = DEVICE.type == "cuda"


def in_float32(**settings: Any) -> PolicyConfig:
    """The settings of a policy whose numbers are compared with others to 1e-5: a GPU would choose bfloat16."""
    return PolicyConfig(**{"dtype": Precision.float32, **settings})
