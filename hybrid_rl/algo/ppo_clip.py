import torch
from torch import Tensor

from hybrid_rl.algo.batch import Tokens
from hybrid_rl.algo.ratio import ratio


def loss(tokens: Tokens, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token −min(ρA, clip(ρ, 1−clip_low, 1+clip_high)·A), ρ = exp(log π_θ − log π_old) (PPO, arXiv 1707.06347, eq. 7).

    dual_clip c > 0: where A < 0 it is at most −c·A (arXiv 1912.09729; c = 3 is usual), since a token that the policy
    made far likelier would otherwise weigh as much as its ratio. c must be above 1 + clip_high. `clip_dual`: whom it silences.
    """
    advantages = tokens.advantages
    losses, statistics = surrogate(ratio(tokens.logprobs, tokens.old_logprobs), advantages, clip_low, clip_high)
    if dual_clip > 0:
        most = -dual_clip * advantages
        cut = (advantages < 0) & (losses > most)
        losses, statistics["clip_dual"] = torch.where(cut, most, losses), cut
    return losses, statistics


def surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's loss of a ratio [M]; the clip silences a token that already went far the way its advantage points, and no other."""
    free, clipped = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    silenced = clipped < free
    return -torch.minimum(free, clipped), {"clip_low": silenced & (advantages < 0), "clip_high": silenced & (advantages > 0)}
