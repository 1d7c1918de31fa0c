"""The device of the tests that are marked `gpu`: the variable TEST_DEVICE chooses it, cpu by default.

`make test-gpu` sets it to cuda and runs exactly these tests. Their expected values come from the CPU in any case.
"""

from __future__ import annotations

import os

import torch

DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cpu"))
ON_GPU = DEVICE.type == "cuda"
