"""Fused attention for GPUs: one call for all samples of a row, each with queries and keys of its own number.

Two kernels compute the same function: torch's own (torch.nn.attention.varlen, torch 2.11 or newer) and flash-attention 2. The first
that works is used: one is tried on a few tokens, forward and backward, before it counts. Other packages share the name
flash_attn (flash-attn-4 comes with SGLang and has no such function), and a kernel may have been built for another torch
or for newer GPUs. Without a kernel each sample is a call of scaled_dot_product_attention.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hybrid_rl.attention.attend import LayerAttention

HALF = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256  # of both kernels; and a head's size must be a multiple of 8
WITHOUT = "SDPA"  # what computes attention if no kernel does


@dataclass(slots=True)
class Spans:
    """How many queries and keys each of n samples has, in order.

    A sample's last query sees its last key, and each earlier query one key fewer (a causal mask that is aligned to the
    bottom right). So a sample with fewer queries than keys is the end of a longer one, whose beginning is computed elsewhere.
    """

    queries: Sequence[int]
    keys: Sequence[int]
    _bounds: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    def bounds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return where samples begin and end among the queries and among the keys, [n + 1] int32 both; made once."""
        if self._bounds is None or self._bounds[0].device != device:
            one, other = (
                torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
                for counts in (self.queries, self.keys)
            )
            self._bounds = one, other
        return self._bounds


@dataclass(frozen=True, slots=True)
class Kernel:
    """`function` is None if the kernel cannot be loaded, and `problem` says why.

    `arguments` translates what a layer asks into the function's keywords; `softcap` tells whether it knows one.
    """

    name: str
    function: Callable[..., Any] | None
    problem: str
    arguments: Callable[[LayerAttention], dict[str, Any]]
    softcap: bool

    def fits(self, query: Tensor, value: Tensor, how: LayerAttention) -> bool:
        """Tell whether it computes this layer; query and value end with the size of a head."""
        size = query.shape[-1]
        known = how.sinks is None and (how.softcap is None or self.softcap)
        return known and size == value.shape[-1] and size <= LARGEST_HEAD and size % 8 == 0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, spans: Spans, how: LayerAttention) -> Tensor:
        """Attend from query [Σ queries, H, D] to key and value [Σ keys, K, D] → [Σ queries, H, D]."""
        assert self.function is not None
        longest = max(spans.queries), max(spans.keys)
        out: Tensor = self.function(query, key, value, *spans.bounds(query.device), *longest, **self.arguments(how))
        return out


def _window(how: LayerAttention) -> tuple[int, int]:
    """Return how many keys before and after its own a query sees; −1: all."""
    return (-1 if how.window is None else how.window - 1, 0)


def load_torch() -> Kernel:
    """Return torch's own kernel. It is deterministic if torch is asked to be."""
    function, problem, more = None, "", {}
    try:
        from torch.nn.attention.varlen import varlen_attn

        known = inspect.signature(varlen_attn).parameters
        if {"scale", "window_size"} <= known.keys():
            function, more = varlen_attn, {"enable_gqa": True} if "enable_gqa" in known else {}
        else:
            problem = f"torch {torch.__version__} has one without windows; 2.11 is needed"
    except ImportError:
        problem = f"torch {torch.__version__} has none; 2.11 is needed"
    asked = lambda how: {"scale": how.scaling, "window_size": _window(how), **more}  # noqa: E731
    return Kernel("torch varlen", function, problem, asked, softcap=False)


def load_flash() -> Kernel:
    """Return flash-attention 2. The only test of the package is to import the function."""
    function, problem = None, ""
    try:
        from flash_attn import flash_attn_varlen_func

        function = flash_attn_varlen_func
    except Exception as error:  # whatever the package raises at its import
        problem = "not installed"
        if importlib.util.find_spec("flash_attn") is not None:
            problem = f"the package flash_attn that is installed has no such kernel: {_line(error)}"

    def asked(how: LayerAttention) -> dict[str, Any]:
        return {
            "softmax_scale": how.scaling,
            "causal": True,
            "window_size": _window(how),
            "deterministic": torch.are_deterministic_algorithms_enabled(),  # of the gradient; a second pass over it
            **({"softcap": how.softcap} if how.softcap else {}),  # flash-attention before 2.6 does not know it
        }

    return Kernel("flash-attention", function, problem, asked, softcap=True)


KERNELS = (load_torch(), load_flash())  # in the order in which they are tried


def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


@cache
def fails(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> str:
    """Return why a kernel cannot be used there, in one line, or "" if it works: forward and backward are tried."""
    from hybrid_rl.attention.attend import LayerAttention

    if kernel.function is None:
        return kernel.problem
    if not on_gpu(device) or dtype not in HALF:
        return (
            f"it computes in bfloat16 or float16 on a GPU, not in {str(dtype).removeprefix('torch.')} on {device.type}"
        )
    try:
        with torch.inference_mode(False), torch.enable_grad():  # an engine may be the first to ask
            q, k, v = (
                torch.ones(n, heads, 64, device=device, dtype=dtype, requires_grad=True)
                for n, heads in ((3, 2), (5, 1), (5, 1))
            )
            kernel(q, k, v, Spans([1, 2], [3, 2]), LayerAttention(0.1)).sum().backward()
            assert q.grad is not None
            if not bool(q.grad.isfinite().all()):
                return "its gradient is not finite"
    except Exception as error:  # a GPU that is too old, kernels built for others
        return _line(error)
    return ""


def choose(device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """Return the first kernel that works on `device` in `dtype`, or None."""
    return next((kernel for kernel in KERNELS if not fails(kernel, device, dtype)), None)


def chosen_name(device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of what computes attention there."""
    kernel = choose(device, dtype)
    return kernel.name if kernel else WITHOUT


def fused(query: Tensor, value: Tensor, how: LayerAttention) -> Kernel | None:
    """Return the kernel for a layer with such tensors, or None."""
    kernel = choose(query.device, query.dtype)
    return kernel if kernel and kernel.fits(query, value, how) else None


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
