"""Compute per-token numbers from hidden states, without ever holding a batch's full logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

ToLogits = Callable[[Tensor], Tensor]


def logits_of(head: nn.Module, config: PreTrainedConfig) -> ToLogits:
    """Return the function from hidden states to logits: the head, then config.json's scale and softcap, if any.

    Loading a model compares the result with the model's own logits.
    """
    text = config.get_text_config()
    scale = (getattr(text, "logit_scale", None) or 1.0) / (getattr(text, "logits_scaling", None) or 1.0)
    cap = getattr(text, "final_logit_softcapping", None)
    if scale == 1.0 and not cap:
        return head

    def logits(hidden: Tensor) -> Tensor:
        scaled = head(hidden) * scale
        return cap * torch.tanh(scaled / cap) if cap else scaled

    return logits


def token_logprobs(
    hidden: Tensor, head: ToLogits, targets: Tensor, temperature: float, chunk: int, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log π(target) and the distribution's entropy, both [M] float32 in nats, at the sampling temperature.

    hidden [M, d], targets [M] int64; logits exist for `chunk` tokens at a time. Entropy has a gradient only with
    `entropy_gradient`, which keeps a second tensor of a chunk's size for backward.
    """

    def one_chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        logits = head(hidden).float()
        logprobs = torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, targets[:, None]).sum(-1), entropy  # sum: FSDP wants no view of what it returns

    logprobs, entropy = _in_chunks(one_chunk, hidden, targets, chunk)
    return logprobs, entropy


def token_cross_entropy(hidden: Tensor, head: ToLogits, targets: Tensor, label_smoothing: float, chunk: int) -> Tensor:
    """Return the supervised loss of each token, [M] float32 in nats.

    It is (1 − ε) · (−log π(target)) + ε · the mean over the vocabulary of −log π, with ε = `label_smoothing`.
    """

    def one_chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        return (cross_entropy(head(hidden).float(), targets, reduction="none", label_smoothing=label_smoothing),)

    return _in_chunks(one_chunk, hidden, targets, chunk)[0]


def _in_chunks(
    function: Callable[[Tensor, Tensor], tuple[Tensor, ...]], hidden: Tensor, targets: Tensor, chunk: int
) -> tuple[Tensor, ...]:
    """Apply `function` to `chunk` tokens at a time; several chunks are computed again in backward."""
    if len(targets) <= chunk:
        return function(hidden, targets)
    pieces = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    results = [checkpoint(function, h, t, use_reentrant=False) for h, t in pieces]
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))
