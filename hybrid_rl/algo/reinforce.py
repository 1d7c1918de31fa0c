from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.algo.batch import Tokens
from hybrid_rl.algo.ratio import floored


def refuses(own: dict[str, Any], run: Any) -> Iterator[tuple[str, str]]:
    if run.rollout.oversample > 1 and not run.algo.correction:
        yield (
            "",
            "has no ratio, so it would take the tokens that rollout.oversample keeps from older weights for the "
            "policy's own; use algo/loss=ppo_clip, or add algo/correction=tis algo.old_logprobs=recomputed",
        )


def loss(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token −A·log π_θ (Williams 1992); with GPG's advantages it is GPG's loss (arXiv 2504.02546).

    Without a ratio nothing is clipped, and nothing bounds how far the policy moves: take one step per batch.
    """
    never = torch.zeros_like(tokens.advantages, dtype=torch.bool)
    return -tokens.advantages * floored(tokens.logprobs), {"clip_low": never, "clip_high": never}
