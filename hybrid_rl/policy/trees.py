"""Attention for group trees: a group's prompt is computed once and its completions are branches of it.

A tree of G completions after a prompt of P tokens costs P + ΣC tokens in every linear layer instead of G·P + ΣC, and its
attention comes in two parts with one softmax over both: a branch looks at the prompt, and causally at itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rl.attention import grouped_sdpa


class Trees:
    """`trees` lists (prompt length, branch lengths); in the flat row [1, T] each prompt is followed by its branches.

    Inside attention, tokens are gathered into padded tensors, prompts [N, P] and branches [N, G, C], so that all trees
    of a row share a handful of matrix products. Padding exists only there, never in the linear layers.
    """

    def __init__(self, trees: list[tuple[int, list[int]]]):
        n, p = len(trees), max(length for length, _ in trees)
        g, c = max(len(branches) for _, branches in trees), max((max(b, default=0) for _, b in trees), default=0)
        self.shape = (n, p, g, c)
        self.prompt_index = torch.zeros(n, p, dtype=torch.int64)
        self.branch_index = torch.zeros(n, g, c, dtype=torch.int64)
        sources: list[Tensor] = []  # for each flat token, its place in [prompts; branches] laid end to end
        start = 0
        for tree, (length, branches) in enumerate(trees):
            self.prompt_index[tree, :length] = torch.arange(start, start + length)
            sources.append(tree * p + torch.arange(length))
            start += length
            for branch, size in enumerate(branches):
                self.branch_index[tree, branch, :size] = torch.arange(start, start + size)
                sources.append(n * p + (tree * g + branch) * c + torch.arange(size))
                start += size
        self.flat_index = torch.cat(sources)
        lengths = torch.tensor([length for length, _ in trees])
        # additive masks, broadcast over heads: which prompt positions exist, and causality inside a branch
        absent = torch.arange(p)[None, :] >= lengths[:, None]
        self.prompt_bias = torch.zeros(n, p).masked_fill(absent, float("-inf"))[:, None, None, None, :]  # [N, 1, 1, 1, P]
        self.branch_bias = torch.full((c, c), float("-inf")).triu(1)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        n, p, g, c = self.shape
        heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[-1]
        rep, value_dim = heads // kv_heads, value.shape[-1]
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
        kp, vp = (x[self.prompt_index].transpose(1, 2) for x in (k, v))  # [N, K, P, D]
        prompts = grouped_sdpa(q[self.prompt_index].transpose(1, 2), kp, vp, scaling)  # right padding: causality hides it
        flat = [prompts.transpose(1, 2).reshape(n * p, heads, value_dim)]
        if c:
            kb, vb = (x[self.branch_index].permute(0, 3, 1, 2, 4) for x in (k, v))  # [N, K, G, C, D]
            qb = (q * scaling)[self.branch_index].view(n, g, c, kv_heads, rep, dim).permute(0, 3, 1, 4, 2, 5)  # [N, K, G, R, C, D]
            to_prompt = qb.reshape(n, kv_heads, g * rep * c, dim) @ kp.transpose(-1, -2)  # [N, K, G·R·C, P]
            to_self = qb.reshape(n, kv_heads, g, rep * c, dim) @ kb.transpose(-1, -2)  # [N, K, G, R·C, C]
            scores = torch.cat(
                [
                    to_prompt.view(n, kv_heads, g, rep * c, p) + self.prompt_bias.to(q.dtype),
                    (to_self.view(n, kv_heads, g, rep, c, c) + self.branch_bias.to(q.dtype)).view(n, kv_heads, g, rep * c, c),
                ],
                dim=-1,
            )
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
            out = (weights[..., :p].reshape(n, kv_heads, g * rep * c, p) @ vp).view(n, kv_heads, g, rep * c, value_dim) + weights[
                ..., p:
            ] @ vb
            flat.append(out.view(n, kv_heads, g, rep, c, value_dim).permute(0, 2, 4, 1, 3, 5).reshape(n * g * c, heads, value_dim))
        return torch.cat(flat)[self.flat_index][None]

    def to(self, device: object) -> Trees:
        for name in ("prompt_index", "branch_index", "flat_index", "prompt_bias", "branch_bias"):
            setattr(self, name, getattr(self, name).to(device))
        return self
