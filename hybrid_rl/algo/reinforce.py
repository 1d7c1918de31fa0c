import torch
from torch import Tensor

from hybrid_rl.algo.batch import Tokens
from hybrid_rl.algo.ratio import floored


def loss(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token −A·log π_θ (Williams 1992); with GPG's advantages it is GPG's loss (arXiv 2504.02546).

    Without a ratio nothing is clipped, and nothing bounds how far the policy moves: take one step per batch.
    """
    never = torch.zeros_like(tokens.advantages, dtype=torch.bool)
    return -tokens.advantages * floored(tokens.logprobs), {"clip_low": never, "clip_high": never}
