from torch import Tensor

from hybrid_rl.algo.ppo_clip import LOG_RATIO_LIMIT


def mismatch_kl(train_logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """Per-token ρ − 1 − log ρ with ρ = π_train / π_behaviour: its mean estimates KL(behaviour ‖ train), in nats.

    Zero when trainer and engine agree on the same weights; what is left is the two engines' numerical difference.
    """
    log_ratio = (train_logprobs - behaviour_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio.expm1() - log_ratio  # expm1: exact near zero, where exp(x) − 1 cancels
