"""Attention for group trees: a group's prompt is computed once and its completions are branches of it.

A tree of G completions after a prompt of P tokens costs P + ΣC tokens in every linear layer instead of G·P + ΣC. Only
attention places the prompt before each branch again. There are three ways, by device and lengths:

- a fused kernel (GPU) takes queries as they lie, and gathered keys, in which each branch's follow its prompt's;
- `Joined` (CPU, long samples) attends to prompt and branch apart, without a mask, and gathers no prompt;
- `Masked` (everything else) gathers branches into padded tensors and hides keys by a mask: the fastest if samples are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hybrid_rl.attention import kernels
from hybrid_rl.attention.attend import Bands, LayerAttention, attention
from hybrid_rl.attention.forest import Forest, padded, spread
from hybrid_rl.attention.joined import Joined, joins

BUCKET = 32  # branches of similar length that are padded to one length and attend together
# The most keys of masks for a token of the row, on average. With more, `Joined` is faster (at 256 both took the same
# time), and memory would grow with the square of the length.
DENSE = 256


class Trees:
    """`trees` lists (prompt length, branch lengths); in the flat row [1, T] each prompt is followed by its branches.

    Index tables are made when a layer first asks for them: a row that waits takes no more memory than its lengths.
    """

    def __init__(self, trees: Sequence[tuple[int, Sequence[int]]]):
        self.forest = Forest(trees)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        if kernel := kernels.fused(query, value, how):
            q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
            spans, at = self._samples
            at = at.to(q.device)
            return kernel(q, k[at], v[at], spans, how)[None]
        within = how.window is None or how.window >= self.forest.longest
        if within and self._dense > DENSE * self.forest.tokens and joins(query, value, how):
            return self._joined.attend(query, key, value, how.scaling)
        return self._masked.attend(query, key, value, how)

    def to(self, device: object) -> Trees:
        return self  # tables are made where the queries are

    @cached_property
    def _dense(self) -> int:
        """Return how many keys the masks of `Masked` hold, over all queries, padding included."""
        size, order = self.forest.branches[1], _by_length(self.forest)
        buckets = (order[i : i + BUCKET] for i in range(0, len(order), BUCKET))
        longest = int(self.forest.prompts[1].max())
        masks = (len(b) * int(size[b].max()) * int(self.forest.sizes[b].max()) for b in buckets)
        return longest * longest * len(self.forest.prompts[1]) + sum(masks)

    @cached_property
    def _joined(self) -> Joined:
        return Joined(self.forest)

    @cached_property
    def _masked(self) -> Masked:
        return Masked(self.forest)

    @cached_property
    def _samples(self) -> tuple[kernels.Spans, Tensor]:
        """Return the samples of a fused kernel, prompts and branches as they lie, and the flat positions of their keys."""
        f = self.forest
        starts, queries = (np.concatenate(pair) for pair in zip(f.prompts, f.branches, strict=True))
        tree = np.concatenate([np.arange(len(f.prompts[0])), f.tree])
        before = np.concatenate([0 * f.prompts[1], f.sizes - f.branches[1]])  # tokens of the prompt before its own
        order = np.lexsort((starts, tree))
        order = order[queries[order] > 0]
        parts = np.stack([f.prompts[0][tree], starts], 1)[order], np.stack([before, queries], 1)[order]
        spans = kernels.Spans(queries[order].tolist(), (before + queries)[order].tolist())
        return spans, torch.from_numpy(spread(*(part.ravel() for part in parts)))


def _by_length(forest: Forest) -> np.ndarray:
    return np.argsort(forest.branches[1], kind="stable")


@dataclass(slots=True)
class _Bucket:
    """B branches: flat positions of their own tokens, [B, C], and of prompt and branch, [B, L].

    `last` [B, 1, C, 1] is the place of each token's own key among the L.
    """

    queries: Tensor
    keys: Tensor
    last: Tensor
    _seen: dict[int | None, Tensor] = field(default_factory=dict)

    def seen(self, window: int | None) -> Tensor:
        """Return the keys that each token may see, [B, 1, C, L] bool: `window` of them, up to its own; cached."""
        if window is not None and window >= self.keys.shape[1]:
            window = None
        if window not in self._seen:
            at = torch.arange(self.keys.shape[1], device=self.last.device)
            seen = at <= self.last
            self._seen[window] = seen if window is None else seen & (at > self.last - window)
        return self._seen[window]


class Masked:
    """Tokens gathered into padded tensors: prompts [N, P], and buckets of branches after their prompts.

    Padding exists only here, never in the linear layers.
    """

    def __init__(self, forest: Forest):
        self.prompts, own = padded(*forest.prompts)
        self._bands = Bands(self.prompts.shape[1])
        self.buckets: list[_Bucket] = []
        # the place of each flat token's result in [prompts; buckets], laid end to end
        self.order = torch.empty(forest.tokens, dtype=torch.int64)
        self.order[self.prompts[own]] = own.flatten().nonzero()[:, 0]
        place = own.numel()
        order = _by_length(forest)
        for i in range(0, len(order), BUCKET):
            bucket, own = _bucket(forest, order[i : i + BUCKET])
            self.order[bucket.queries[own]] = place + own.flatten().nonzero()[:, 0]
            place += own.numel()
            self.buckets.append(bucket)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        self._move(query.device)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
        own, keys, values = (x[self.prompts].transpose(1, 2) for x in (q, k, v))
        band = self._bands.of(self.prompts.shape[1], how.window, q.device)
        results = [attention(own, keys, values, how, band)]  # right padding: causality hides it
        for bucket in self.buckets:
            keys, values = (x[bucket.keys].transpose(1, 2) for x in (k, v))
            own = q[bucket.queries].transpose(1, 2)
            results.append(attention(own, keys, values, how, bucket.seen(how.window)))
        return torch.cat([r.transpose(1, 2).flatten(0, 1) for r in results])[self.order][None]

    def _move(self, device: torch.device) -> None:
        """Move the tables to the device, once."""
        if self.order.device == device:
            return
        for owner, name in [
            (self, "prompts"),
            (self, "order"),
            *((b, n) for b in self.buckets for n in ("queries", "keys", "last")),
        ]:
            setattr(owner, name, getattr(owner, name).to(device))


def _bucket(forest: Forest, chosen: np.ndarray) -> tuple[_Bucket, Tensor]:
    """Return the chosen branches as a bucket, and which of its queries are their own, [B, C]."""
    queries, own = padded(forest.branches[0][chosen], forest.branches[1][chosen])
    prompt, before = (x[forest.tree[chosen]] for x in forest.prompts)
    starts, lengths = (
        np.stack([prompt, forest.branches[0][chosen]], 1),
        np.stack([before, forest.branches[1][chosen]], 1),
    )
    keys, there = padded(0 * before, lengths.sum(1))
    keys[there] = torch.from_numpy(spread(starts.ravel(), lengths.ravel()))
    # token t of a branch is key P + t after its prompt; padding must see a key too, or its gradient would be 0 · NaN
    last = torch.from_numpy(before)[:, None, None, None] + torch.arange(queries.shape[1])[:, None]
    return _Bucket(queries, keys, last.clamp(max=keys.shape[1] - 1)), own
