"""The options of an SGLang engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class SGLangOptions:
    """How an engine runs, apart from its model and the size of its batches."""

    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    memory_fraction: float = 0.5  # of a GPU's free memory that weights and KV cache may take
    deterministic: bool = True  # whether a request's seed alone decides its tokens, whatever else runs
    seed: int = 0  # of an engine that is not deterministic; must differ between engines
    timeout: float = 300.0  # seconds without an answer or progress after which the process counts as dead
    start_timeout: float = 1800.0  # seconds within which it must have started
    log: Path | None = None  # the file for SGLang's own output
    arguments: Mapping[str, Any] = field(default_factory=dict)  # more arguments of `sglang.Engine`, which win over ours
