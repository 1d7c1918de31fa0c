import torch
from torch import Tensor

from hybrid_rl.algo.batch import Tokens
from hybrid_rl.algo.ratio import log_ratio

NEEDS = ("rollout_advantages",)
BOUNDS = {"clip_low": (0, None), "clip_high": (0, None)}


def loss(tokens: Tokens, clip_low: float = 0.4, clip_high: float = 0.4) -> tuple[Tensor, dict[str, Tensor]]:
    """−A · exp(mean over the rollout of c), c = min(log ρ, clip_high) if A > 0, max(log ρ, −clip_low) if A < 0 (GMPO,
    arXiv 2507.20673).

    The geometric mean of the rollout's ratios, each clipped alone and in logarithms: one token far off moves it little,
    and is silenced without its rollout. The bounds are e^−0.4 and e^0.4. The paper's objective is the mean over
    rollouts: aggregation `seq_mean`.
    """
    advantages, moved = tokens.advantages, log_ratio(tokens.logprobs, tokens.old_logprobs)
    rising, falling = advantages > 0, advantages < 0
    clipped = torch.where(rising, moved.clamp(max=clip_high), torch.where(falling, moved.clamp(min=-clip_low), moved))
    losses = -advantages * tokens.mean_of_rollout(clipped).exp()
    return losses, {"clip_low": falling & (moved < -clip_low), "clip_high": rising & (moved > clip_high)}
