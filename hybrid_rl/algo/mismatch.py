from torch import Tensor

from hybrid_rl.algo.kl import k3


def mismatch_kl(train_logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """Per-token ρ − 1 − log ρ with ρ = π_train / π_behaviour: its mean estimates KL(behaviour ‖ train), in nats.

    Zero when trainer and engine agree on the same weights; what is left is the two engines' numerical difference.
    """
    return k3(behaviour_logprobs, train_logprobs)
