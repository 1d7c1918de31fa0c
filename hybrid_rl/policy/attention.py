"""One attention function for training and sampling, registered with transformers' attention interface.

A model loaded with `attn_implementation="hybrid_rl"` calls `attend_with_layout` in every layer. What a token may
look at is decided by the `layout` object that the caller passes to the model's forward (`model(..., layout=layout)`;
transformers hands unknown keyword arguments down to the attention function). So no dense mask is ever built, and any
causal LM of transformers that uses its attention interface works unchanged.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from hybrid_rl.policy import flash

ATTENTION_NAME = "hybrid_rl"


class AttentionLayout(Protocol):
    """How samples lie in a forward pass.

    attend() gets the layer's index, query [B, H, T, D], key and value [B, K, T, D] (K key/value heads, H a multiple
    of K) and returns [B, T, H, D] in the query's dtype.
    """

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor: ...

    def to(self, device: object) -> AttentionLayout: ...


def attend_with_layout(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, layout: AttentionLayout | None = None, **other: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The function transformers calls; refuses what a layout does not compute instead of ignoring it."""
    if layout is None:
        raise ValueError(f"{type(module).__name__} was called without a layout, or does not hand keyword arguments to its attention")
    unsupported = [name for name in ("sliding_window", "softcap", "s_aux") if other.get(name) is not None]
    if unsupported or attention_mask is not None or (dropout and module.training):
        raise ValueError(
            f"{type(module).__name__} needs {unsupported or 'an attention mask or dropout'}, which hybrid_rl's attention does not compute"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return layout.attend(int(module.layer_idx), query, key, value, scaling), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION_NAME, attend_with_layout)


def grouped_sdpa(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Causal attention of [B, H, T, D] over [B, K, T, D] → [B, H, T, D]; several query heads share a key/value head."""
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])


class Padded:
    """Samples padded on the right to `width` and laid end to end, [1, B·width]: plain causal attention, the reference."""

    def __init__(self, width: int):
        self.width = width

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        q, k, v = (x[0].unflatten(1, (-1, self.width)).transpose(0, 1) for x in (query, key, value))  # [B, H, width, D]
        return grouped_sdpa(q, k, v, scaling).transpose(1, 2).flatten(0, 1)[None]

    def to(self, device: object) -> Padded:
        return self


class Packed:
    """Samples end to end in one row [1, T]; each attends causally to itself alone. `lengths` sum to T."""

    def __init__(self, lengths: list[int]):
        self.lengths = lengths
        self._cumulative: Tensor | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        if flash.varlen is not None and query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
            bounds = self._bounds(query.device)
            longest = max(self.lengths)
            q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
            repeats = torch.are_deterministic_algorithms_enabled()  # of the gradient; a second pass over it
            return flash.varlen(q, k, v, bounds, bounds, longest, longest, softmax_scale=scaling, causal=True, deterministic=repeats)[None]
        parts = zip(*(x.split(self.lengths, dim=2) for x in (query, key, value)), strict=True)
        return torch.cat([grouped_sdpa(q, k, v, scaling) for q, k, v in parts], dim=2).transpose(1, 2)

    def _bounds(self, device: torch.device) -> Tensor:
        if self._cumulative is None:
            self._cumulative = torch.tensor([0, *self.lengths], device=device).cumsum(0).to(torch.int32)
        return self._cumulative

    def to(self, device: object) -> Packed:
        return self
