from torch import Tensor

from hybrid_rl.algo.batch import Tokens
from hybrid_rl.algo.ppo_clip import surrogate
from hybrid_rl.algo.ratio import log_ratio

NEEDS = ("rollout_advantages",)
BOUNDS = {"clip_low": (0, None), "clip_high": (0, None)}


def loss(tokens: Tokens, clip_low: float = 3e-4, clip_high: float = 4e-4) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped loss with one ratio a rollout, s = exp(mean log ρ) over its tokens (GSPO, arXiv 2507.18071, eq.
    5–7).

    The paper's objective is the mean over rollouts: aggregation `seq_mean`. The clip silences whole rollouts; s moves
    far less than a token's ratio, so the band is a thousandth of PPO's. The gradient goes through the mean, and equals
    that of the paper's token form.
    """
    ratio = tokens.mean_of_rollout(log_ratio(tokens.logprobs, tokens.old_logprobs)).exp()
    return surrogate(ratio, tokens.advantages, clip_low, clip_high)
