"""Sample a token and its log-probability in one pass over the logits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hybrid_rl.algo.sums import cumsum
from hybrid_rl.engine.base import Sampling

LARGEST_UNIFORM = float(np.nextafter(np.float32(1.0), np.float32(0.0)))


def uniforms(seed: int, count: int) -> np.ndarray:
    """Return a request's random stream [count], float32 in [0, 1); it depends on the seed alone."""
    stream = np.random.Generator(np.random.Philox(key=seed & (2**64 - 1))).random(count)
    return np.minimum(stream, LARGEST_UNIFORM).astype(np.float32)


def sample(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return token ids [n] int64 and log-probabilities [n] float32, from logits [n, V] and numbers [n] in [0, 1).

    The token is the inverse of the cumulative distribution at the `uniform` number. One random number per token is
    several times faster on large vocabularies than one per vocabulary entry. The log-probability is that of the whole
    distribution at the temperature, as the trainer computes it; top-k and top-p only restrict what is drawn.
    """
    greedy = sampling.temperature == 0.0
    logits = logits.float()
    logprobs = torch.log_softmax(
        logits if greedy or sampling.temperature == 1.0 else logits / sampling.temperature, dim=-1
    )
    if greedy:
        ids = logprobs.argmax(-1, keepdim=True)
    else:
        cumulative = cumsum(_filtered(logprobs.exp(), sampling), rising=True)
        # right=True finds the first entry whose cumulative exceeds the target: one of probability 0 is never drawn
        target = torch.minimum(
            uniform[:, None] * cumulative[:, -1:], torch.nextafter(cumulative[:, -1:], cumulative.new_zeros(()))
        )
        ids = torch.searchsorted(cumulative, target, right=True)
        ids.clamp_(max=logits.shape[-1] - 1)  # NaN logits lead past the end; the log-probability is then NaN
    return ids[:, 0], logprobs.gather(-1, ids)[:, 0]


def _filtered(probs: Tensor, sampling: Sampling) -> Tensor:
    """Return probabilities with 0 for what top-k, then top-p, exclude; ties with the last kept entry stay."""
    if 0 < sampling.top_k < probs.shape[-1]:
        least = probs.topk(sampling.top_k, dim=-1).values[:, -1:]
        probs = probs.masked_fill(probs < least, 0.0)
    if sampling.top_p < 1.0:
        ordered = probs.sort(dim=-1, descending=True).values
        before = cumsum(ordered) - ordered  # mass of the entries ahead of each
        kept = before < sampling.top_p * ordered.sum(-1, keepdim=True)
        least = ordered.masked_fill(~kept, float("inf")).min(-1, keepdim=True).values
        probs = probs.masked_fill(probs < least, 0.0)
    return probs
