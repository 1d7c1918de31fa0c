"""flash-attention 2: the kernel that attends within each sample of a packed row, for GPUs.

The only test is to import the function. Other packages share the name flash_attn (flash-attn-4 comes with SGLang and
has no such function), and kernels that were built for another torch fail when they load.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any


def load() -> tuple[Callable[..., Any] | None, str]:
    """Return flash_attn_varlen_func, or None and why it cannot be had."""
    try:
        from flash_attn import flash_attn_varlen_func
    except Exception as error:  # whatever the package raises at its import
        if importlib.util.find_spec("flash_attn") is None:
            return None, "not installed"
        return None, f"the package flash_attn that is installed has no such kernel: {str(error).partition(chr(10))[0]}"
    return flash_attn_varlen_func, ""


varlen, problem = load()
