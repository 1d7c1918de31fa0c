from torch import Tensor

from hybrid_rl.algo.ppo_clip import LOG_RATIO_LIMIT


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(d) − d − 1 with d = log π_ref − log π, [M] each: on tokens sampled from π its mean estimates KL(π ‖ π_ref), in nats.

    Never negative; unbiased, with less variance than −d (J. Schulman, "Approximating KL divergence", 2020).
    """
    d = (reference_logprobs - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return d.expm1() - d  # expm1: exact near zero, where exp(d) − 1 cancels
