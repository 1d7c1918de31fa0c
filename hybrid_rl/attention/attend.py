"""One attention function for training and sampling, registered with transformers' attention interface.

A model loaded with `attn_implementation="hybrid_rl"` calls `attend_with_layout` in every layer. What a token may see is
decided by the `layout` object that the caller passes to the model's forward (`model(..., layout=layout)`; transformers
passes unknown keyword arguments on to the attention function), and by the layer's window, if it has one. So full
attention never builds a dense mask, and any causal LM that uses transformers' attention interface works unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig

from hybrid_rl.attention import kernels

ATTENTION_NAME = "hybrid_rl"


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """A layer's attention: softmax(softcap · tanh(scaling · q·k / softcap)) · v over the tokens that a token may see.

    It sees the last `window` tokens, itself included; None: all up to itself. `softcap` None: no tanh.
    `sinks` [H] are logits that take part in the softmax and add no value.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Return whether kernels without softcap and sinks compute it."""
        return self.softcap is None and self.sinks is None


class AttentionLayout(Protocol):
    """How samples lie in a forward pass.

    attend() gets the layer's index, query [B, H, T, D], key and value [B, K, T, D] (K key/value heads, H a multiple
    of K) and returns [B, T, H, D] in the query's dtype.
    """

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor: ...

    def to(self, device: object) -> AttentionLayout: ...


# arguments of some families' attention that no layout computes
UNSUPPORTED = ("position_bias", "indices", "block_indices", "sinks")


def attend_with_layout(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: AttentionLayout | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention functions do: query [1, H, T, D], key and value [1, K, T, D] → [1, T, H, D].

    `asked` holds the layer's other arguments. Raises ValueError for those that no layout computes.
    """
    if layout is None:
        raise ValueError(
            f"{type(module).__name__} was called without a layout, or does not hand keyword arguments to its attention"
        )
    unsupported = [name for name in UNSUPPORTED if asked.get(name) is not None]
    if asked.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        unsupported.append("attention to later tokens")
    if unsupported or attention_mask is not None or (asked.get("dropout") and module.training):
        needs = ", ".join(unsupported) or "an attention mask or dropout"
        raise ValueError(f"{type(module).__name__} needs {needs}, which hybrid_rl's attention does not compute")
    scaling = asked.get("scaling")
    how = LayerAttention(
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        asked.get("sliding_window"),
        asked.get("softcap"),
        asked.get("s_aux"),
    )
    out = layout.attend(int(module.layer_idx), query, key, value, how)  # type: ignore[arg-type]
    return out.contiguous(), None  # as transformers' own functions; some models take a view of it


AttentionInterface.register(ATTENTION_NAME, attend_with_layout)


def configured_windows(config: PreTrainedConfig) -> list[int | None]:
    """Return each layer's window in tokens as config.json has it, None for full attention.

    Raises ValueError for layers of another kind, except for chunked attention, which is full as long as samples fit a
    chunk.
    """
    text = config.get_text_config()
    window, layers = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    if not layers:
        return [window] * text.num_hidden_layers
    if other := sorted(set(layers) - {"full_attention", "sliding_attention", "chunked_attention"}):
        raise ValueError(
            f"it has layers of {', '.join(other)}; only full_attention and sliding_attention are supported"
        )
    return [window if layer == "sliding_attention" else None for layer in layers]


def attention(query: Tensor, key: Tensor, value: Tensor, how: LayerAttention, seen: Tensor | None = None) -> Tensor:
    """Attend from query [B, H, T, D] to key and value [B, K, L, D] → [B, H, T, D]; several query heads share a
    key/value head.

    `seen`, bool, broadcast to [B, H, T, L], says what each token may see; None: causally all of itself (T = L).
    """
    if how.plain:
        grouped = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(
            query, key, value, attn_mask=seen, is_causal=seen is None, scale=how.scaling, enable_gqa=grouped
        )
    (b, heads, t, dim), (kv_heads, length) = query.shape, key.shape[1:3]
    if seen is None:
        seen = torch.ones(t, t, dtype=torch.bool, device=query.device).tril()
    # the heads that share a key/value head become its queries, so that keys are never repeated in memory
    grouped_shape = (b, kv_heads, heads // kv_heads * t)
    scores = (query * how.scaling).reshape(*grouped_shape, dim) @ key.transpose(-1, -2)
    bias = torch.zeros(seen.shape, dtype=scores.dtype, device=scores.device).masked_fill_(~seen, float("-inf"))
    weights = softmax(scores.view(b, heads, t, length), bias, how).view(*grouped_shape, length)
    return (weights @ value).view(b, heads, t, value.shape[-1])


def softmax(scores: Tensor, bias: Tensor, how: LayerAttention) -> Tensor:
    """Return weights from scaled scores [B, H, T, L], or heads in two dimensions with T = 1; `bias` hides by −inf."""
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    scores = scores + bias
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    if how.sinks is not None:  # exp(s) / (Σ exp(s) + exp(sink))
        sinks = how.sinks.float().view(scores.shape[1], -1, 1)
        weights = weights * torch.sigmoid(scores.float().logsumexp(-1, keepdim=True) - sinks)
    return weights.to(scores.dtype)


class Bands:
    """The [T, T] masks of causal attention in windows, made once per window and shared by its layers."""

    def __init__(self, longest: int):
        self.longest = longest
        self._made: dict[int, Tensor] = {}

    def of(self, length: int, window: int | None, device: torch.device) -> Tensor | None:
        """Return the mask of a sample, [length, length] bool, or None if the window covers the whole sample."""
        if window is None or window >= length:
            return None
        if window not in self._made:
            at = torch.arange(self.longest, device=device)
            age = at[:, None] - at
            self._made[window] = (age >= 0) & (age < window)
        return self._made[window][:length, :length]


class Padded:
    """Samples padded on the right to `width`, end to end in one row [1, B·width], with plain causal attention."""

    def __init__(self, width: int):
        self.width = width
        self._bands = Bands(width)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        q, k, v = (x[0].unflatten(1, (-1, self.width)).transpose(0, 1) for x in (query, key, value))  # [B, H, width, D]
        return (
            attention(q, k, v, how, self._bands.of(self.width, how.window, q.device))
            .transpose(1, 2)
            .flatten(0, 1)[None]
        )

    def to(self, device: object) -> Padded:
        return self


class Packed:
    """Samples end to end in one row [1, T]; each attends causally to itself alone. `lengths` sum to T."""

    def __init__(self, lengths: list[int]):
        self.lengths = lengths
        self._bands = Bands(max(lengths))
        self._spans = kernels.Spans(lengths, lengths)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        if kernel := kernels.fused(query, value, how):
            q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
            return kernel(q, k, v, self._spans, how)[None]
        parts = zip(*(x.split(self.lengths, dim=2) for x in (query, key, value)), self.lengths, strict=True)
        results = [attention(q, k, v, how, self._bands.of(length, how.window, q.device)) for q, k, v, length in parts]
        return torch.cat(results, dim=2).transpose(1, 2)

    def to(self, device: object) -> Packed:
        return self
