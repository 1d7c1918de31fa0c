from torch import Tensor

from hybrid_rl.algo.batch import Tokens
from hybrid_rl.algo.ratio import log_ratio

BOUNDS = {"delta": (0, None)}


def select(minibatch: Tokens, delta: float = 0.5) -> Tensor:
    """0 where A < 0 and the rollout's mean of log π_old − log π_θ is above delta, else 1 (DeepSeek-V3.2's off-policy
    sequence mask, arXiv 2512.02556).

    A bad answer that has become unlikely teaches the policy little and has a large gradient. With
    algo.old_logprobs=behaviour π_old is the engine's, as in the paper, and its mismatch counts too. TRL's delta is 0.5,
    slime's 1e-4. Silenced tokens stay in the aggregation's count.
    """
    left = minibatch.mean_of_rollout(-log_ratio(minibatch.logprobs, minibatch.old_logprobs))
    return (~((minibatch.advantages < 0) & (left > delta))).float()
