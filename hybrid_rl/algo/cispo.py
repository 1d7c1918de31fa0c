from torch import Tensor

from hybrid_rl.algo.batch import Tokens
from hybrid_rl.algo.ratio import floored, ratio

BOUNDS = {"clip_low": (0, None), "clip_high": (0, None)}


def loss(tokens: Tokens, clip_low: float = 1.0, clip_high: float = 4.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token −sg(clip(ρ, 1−clip_low, 1+clip_high))·A·log π_θ (CISPO, MiniMax-M1, arXiv 2506.13585, eq. 4–5).

    The clip cuts a token's weight and never its gradient. clip_low 1 is no lower bound, as in the paper, which names no
    clip_high. The defaults bound ρ to [0, 5]: SkyRL's 1.0 and 4.0, and TRL's epsilon_high of 5.0, which is the bound
    itself. verl clips to PPO's [0.8, 1.2] unless told otherwise.
    """
    weight = ratio(tokens.logprobs, tokens.old_logprobs).detach()
    losses = -weight.clamp(1 - clip_low, 1 + clip_high) * tokens.advantages * floored(tokens.logprobs)
    return losses, {"clip_low": weight < 1 - clip_low, "clip_high": weight > 1 + clip_high}
