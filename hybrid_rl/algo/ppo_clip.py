import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # keeps exp() finite whatever happened to the policy


def loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, Tensor]:
    """Per-token −min(ρA, clip(ρ, 1−clip_low, 1+clip_high)·A), ρ = exp(log π_θ − log π_old) (PPO, arXiv 1707.06347, eq. 7).

    All [M] float32; gradient flows through `logprobs` alone. Also returns which tokens the clip silences, [M] bool.
    """
    ratio = (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    free, clipped = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(free, clipped), (clipped < free).detach()
