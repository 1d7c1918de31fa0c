"""Log-probability and entropy of sampled tokens from hidden states, without ever holding a batch's full logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def token_logprobs(hidden: Tensor, head: nn.Module, targets: Tensor, temperature: float, chunk: int) -> tuple[Tensor, Tensor]:
    """log π(target) and the distribution's entropy, both [M] float32 in nats, at the sampling temperature.

    hidden [M, d], targets [M] int64. Logits exist for `chunk` tokens at a time ([chunk, V] float32) and are computed again
    in backward, except where one chunk holds everything. Entropy carries no gradient.
    """
    if len(targets) <= chunk:
        return _chunk(hidden, head, targets, temperature)
    parts = [
        checkpoint(_chunk, h, head, t, temperature, use_reentrant=False)
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(hidden: Tensor, head: nn.Module, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropy
