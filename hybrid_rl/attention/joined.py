"""Attention of long group trees on a CPU: to the prompt, and to the branch itself, joined by their log-sum-exp.

A branch attends causally to itself, and all branches of a prompt attend to it in one call without a mask. Of a token's
two results o₁, o₂ with log-sum-exps l₁, l₂ the whole is o = (e^l₁ o₁ + e^l₂ o₂) / e^l with e^l = e^l₁ + e^l₂. The gradient
of each part is the kernel's own for the whole o and l, since a key's weight is exp(score − l) whatever else there is
(as in ring attention, Liu et al. 2023, arXiv 2310.01889). Memory stays proportional to tokens: no mask, no repeated prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid_rl.attention.attend import LayerAttention
from hybrid_rl.attention.forest import Forest, padded

BUCKET_TOKENS = 2048  # of short parts that are padded to one length and attend together; longer ones attend alone
# torch's CPU kernel behind scaled_dot_product_attention; only it returns the log-sum-exp. Not in torch's documentation.
KERNEL = "_scaled_dot_product_flash_attention_for_cpu"


def joins(query: Tensor, value: Tensor, how: LayerAttention) -> bool:
    """Return whether parts can be joined for a layer with such tensors: on a CPU, without softcap and sinks."""
    return query.device.type == "cpu" and how.plain and query.shape[-1] == value.shape[-1] and works()


@cache
def works() -> bool:
    """Try the kernel on a few tokens, forward and backward; a torch without it, or with another, computes by masks."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            q, k = torch.ones(1, 4, 5, 8), torch.ones(1, 2, 5, 8, requires_grad=True)
            out = Joined(Forest([(2, [2, 1])])).attend(q, k, k, 0.1)
            out.sum().backward()
            return bool((out - 1).abs().max() < 1e-5) and k.grad is not None and bool(k.grad.isfinite().all())
    except Exception:  # the name or its arguments changed
        return False


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Parts that attend causally to themselves together: their positions, [B, C], 0 for padding; `own` is False there.

    `flat` are the positions without padding, [tokens]. Without padding, as for one long part, both are a view's bounds.
    """

    at: Tensor | slice
    own: Tensor
    flat: Tensor | slice

    def take(self, x: Tensor, fill: float | None = None) -> Tensor:
        """Return [B, heads, C, …] of x [T, heads, …], with `fill` for padding."""
        if isinstance(self.at, slice):
            return x[self.at][None].transpose(1, 2)
        taken = x[self.at]
        if fill is not None:
            taken = taken.masked_fill(~self.own.view(*self.own.shape, *[1] * (x.dim() - 1)), fill)
        return taken.transpose(1, 2)

    def put(self, x: Tensor, values: Tensor) -> None:
        """Write what `take` returns back into x."""
        values = values.transpose(1, 2)
        x[self.flat] = values[0] if isinstance(self.at, slice) else values[self.own]


class Joined:
    """The parts of a forest: `buckets` attend causally to themselves, `shared` are (prompt, its branches)."""

    def __init__(self, forest: Forest):
        (prompt, length), (start, size) = forest.prompts, forest.branches
        branches = np.bincount(forest.tree, minlength=len(prompt))  # of each tree
        tokens = np.bincount(forest.tree, size, len(prompt)).astype(np.int64)  # of each tree's branches
        alone = branches == 1  # prompt and branch are one causal sample
        several = ~alone[forest.tree]
        starts = np.concatenate([prompt, start[several]])
        lengths = np.concatenate([np.where(alone, length + tokens, length), size[several]])
        self.buckets = list(_buckets(starts[lengths > 0], lengths[lengths > 0]))
        ends = prompt + length
        self.shared = [
            (slice(int(prompt[i]), int(ends[i])), slice(int(ends[i]), int(ends[i] + tokens[i])))
            for i in np.flatnonzero((branches > 1) & (length > 0))
        ]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend as a layout does: query [1, H, T, D], key and value [1, K, T, D] → [1, T, H, D]."""
        out: Tensor = _Attention.apply(query, key, value, self, scaling)
        return out


def _buckets(starts: np.ndarray, lengths: np.ndarray) -> Iterator[_Bucket]:
    """Yield buckets of parts of similar length, of at most BUCKET_TOKENS tokens with their padding."""
    order = np.argsort(lengths, kind="stable")
    first = 0
    for last in range(1, len(order) + 1):  # a bucket ends before the part that would make it too large
        if last < len(order) and int(lengths[order[last]]) * (last + 1 - first) <= BUCKET_TOKENS:
            continue
        chosen, first = order[first:last], last
        if len(chosen) == 1:
            start, length = int(starts[chosen[0]]), int(lengths[chosen[0]])
            view = slice(start, start + length)
            yield _Bucket(view, torch.empty(0), view)
        else:
            at, own = padded(starts[chosen], lengths[chosen])
            yield _Bucket(at, own, at[own])


def _forward(given: Iterable[Tensor], causal: bool, scaling: float) -> tuple[Tensor, Tensor]:
    """Return the result for query, key and value, [B, H, T, D], and its log-sum-exp, [B, H, T]."""
    out: tuple[Tensor, Tensor] = getattr(torch.ops.aten, KERNEL)(*given, 0.0, causal, scale=scaling)
    return out


def _backward(given: Iterable[Tensor], causal: bool, scaling: float) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value; `given` is that of the result, those three, the result and its lse."""
    out: tuple[Tensor, ...] = getattr(torch.ops.aten, f"{KERNEL}_backward")(*given, 0.0, causal, scale=scaling)
    return out


def _heads(x: Tensor, at: slice) -> Tensor:
    """Return [1, heads, n, …] of x [T, heads, …]."""
    return x[at].transpose(0, 1)[None]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: Joined, scaling: float) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
        out = torch.empty(q.shape, dtype=q.dtype)
        lse = torch.empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        for bucket in parts.buckets:
            own, own_lse = _forward((bucket.take(x) for x in (q, k, v)), True, scaling)
            bucket.put(out, own)
            bucket.put(lse, own_lse)
        for prompt, branches in parts.shared:
            given = _heads(q, branches), _heads(k, prompt), _heads(v, prompt)
            to_prompt, other = (x[0].transpose(0, 1) for x in _forward(given, False, scaling))
            whole = torch.logaddexp(lse[branches], other)
            joined = (lse[branches] - whole).exp_()[..., None] * out[branches]
            out[branches] = joined.addcmul_((other - whole).exp_()[..., None], to_prompt).to(out)
            lse[branches] = whole
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.parts, ctx.scaling = parts, scaling
        return out[None]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        gradient = gradients[0][0]
        found = [torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v)]
        for bucket in ctx.parts.buckets:
            # padding has weight exp(score − ∞) = 0 and no gradient of its own
            given = bucket.take(gradient, 0.0), *(bucket.take(x) for x in (q, k, v, out)), bucket.take(lse, torch.inf)
            for whole, own in zip(found, _backward(given, True, ctx.scaling), strict=True):
                bucket.put(whole, own)
        for prompt, branches in ctx.parts.shared:
            places = branches, branches, prompt, prompt, branches, branches
            views = [_heads(x, at) for x, at in zip((gradient, q, k, v, out, lse), places, strict=True)]
            for whole, at, own in zip(found, places[1:4], _backward(views, False, ctx.scaling), strict=True):
                whole[at] += own[0].transpose(0, 1)
        return *(x.transpose(0, 1)[None] for x in found), None, None
