from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.algo.batch import Tokens
from hybrid_rl.algo.ratio import ratio

BOUNDS = {"clip_low": (0, None), "clip_high": (0, None)}


def refuses(own: dict[str, Any], run: Any) -> Iterator[tuple[str, str]]:
    if own["dual_clip"] and not own["dual_clip"] > 1 + own["clip_high"]:
        yield "dual_clip", f"must be 0 (off) or more than 1 + clip_high = {1 + own['clip_high']:g}; 3 is usual"


def loss(
    tokens: Tokens, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = 3.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token −min(ρA, clip(ρ, 1−clip_low, 1+clip_high)·A), ρ = exp(log π_θ − log π_old) (PPO, arXiv 1707.06347, eq.
    7).

    dual_clip c: if A < 0 the loss is at most −c·A (arXiv 1912.09729); otherwise a token that became far likelier would
    count with its whole ratio, 20 |A| at ρ = e³. `clip_dual`: the tokens that it silences. 0 or null: off.
    """
    advantages = tokens.advantages
    losses, statistics = surrogate(ratio(tokens.logprobs, tokens.old_logprobs), advantages, clip_low, clip_high)
    if dual_clip:
        most = -dual_clip * advantages
        cut = (advantages < 0) & (losses > most)
        losses, statistics["clip_dual"] = torch.where(cut, most, losses), cut
    return losses, statistics


def surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's loss of a ratio [M], and the tokens that each clip silences.

    The clip silences only tokens that have already moved far in the direction of their advantage.
    """
    free, clipped = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    silenced = clipped < free
    return -torch.minimum(free, clipped), {
        "clip_low": silenced & (advantages < 0),
        "clip_high": silenced & (advantages > 0),
    }
