"""Attention for group trees: a group's prompt is computed once and its completions are branches of it.

A tree of G completions after a prompt of P tokens costs P + ΣC tokens in every linear layer instead of G·P + ΣC. Only
attention places the prompt before each branch again, as keys and values that are already computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hybrid_rl.attention import kernels
from hybrid_rl.attention.attend import Bands, LayerAttention, attention

BUCKET = 32  # branches of similar length that are padded to one length and attend together


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


class Trees:
    """`trees` lists (prompt length, branch lengths); in the flat row [1, T] each prompt is followed by its branches.

    A fused kernel takes the queries as they lie; prompts and branches are its samples, and before each branch's own keys lie
    those of its prompt. Without a kernel, attention gathers tokens into padded tensors, prompts [N, P] and buckets of
    branches, and brings the results back into the flat order. Padding exists only there, never in the linear layers.
    """

    def __init__(self, trees: list[tuple[int, list[int]]]):
        prompts: list[Tensor] = []
        branches: list[tuple[Tensor, Tensor]] = []  # flat positions of the prompt and of the branch
        samples: list[
            tuple[int, list[Tensor]]
        ] = []  # for a fused kernel: number of queries, flat positions of the keys
        start = 0
        for length, sizes in trees:
            prompts.append(torch.arange(start, start + length))
            if length:
                samples.append((length, [prompts[-1]]))
            start += length
            for size in filter(None, sizes):
                branches.append((prompts[-1], torch.arange(start, start + size)))
                samples.append((size, list(branches[-1])))
                start += size
        self.keys = torch.cat([positions for _, parts in samples for positions in parts])
        self._spans = kernels.Spans([n for n, _ in samples], [sum(map(len, parts)) for _, parts in samples])
        branches.sort(key=lambda pair: len(pair[1]))
        chunks = [branches[i : i + BUCKET] for i in range(0, len(branches), BUCKET)]
        self.prompts = pad_sequence(prompts, batch_first=True)
        self._bands = Bands(self.prompts.shape[1])
        self.buckets = [_bucket(chunk) for chunk in chunks]
        # the place of each flat token's result in [prompts; buckets], laid end to end
        self.order = torch.empty(start, dtype=torch.int64)
        place = 0
        tables = [
            (self.prompts, prompts),
            *((b.queries, [own for _, own in c]) for b, c in zip(self.buckets, chunks, strict=True)),
        ]
        for padded, rows in tables:
            for row, positions in enumerate(rows):
                self.order[positions] = place + row * padded.shape[1] + torch.arange(len(positions))
            place += padded.numel()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
        if kernel := kernels.fused(query, value, how):
            return kernel(q, k[self.keys], v[self.keys], self._spans, how)[None]
        own, keys, values = (x[self.prompts].transpose(1, 2) for x in (q, k, v))
        band = self._bands.of(self.prompts.shape[1], how.window, q.device)
        results = [attention(own, keys, values, how, band)]  # right padding: causality hides it
        for bucket in self.buckets:
            keys, values = (x[bucket.keys].transpose(1, 2) for x in (k, v))
            own = q[bucket.queries].transpose(1, 2)
            results.append(attention(own, keys, values, how, bucket.seen(how.window)))
        return torch.cat([r.transpose(1, 2).flatten(0, 1) for r in results])[self.order][None]

    def to(self, device: object) -> Trees:
        for owner, name in [
            (self, "prompts"),
            (self, "order"),
            (self, "keys"),
            *((b, n) for b in self.buckets for n in ("queries", "keys", "last")),
        ]:
            setattr(owner, name, getattr(owner, name).to(device))
        return self


def _bucket(branches: list[tuple[Tensor, Tensor]]) -> _Bucket:
    queries = pad_sequence([branch for _, branch in branches], batch_first=True)
    keys = pad_sequence([torch.cat(pair) for pair in branches], batch_first=True)
    # token t of a branch is key P + t after its prompt; padding must see a key too, or its gradient would be 0 · NaN
    last = (
        torch.tensor([len(prompt) for prompt, _ in branches])[:, None, None, None]
        + torch.arange(queries.shape[1])[:, None]
    )
    return _Bucket(queries, keys, last.clamp(max=keys.shape[1] - 1))
