import torch
from torch import Tensor

from hybrid_rl.algo.batch import Scored
from hybrid_rl.algo.mismatch import mismatch_kl

BOUNDS = {"limit": (0, None)}


def correct(batch: Scored, limit: float = 0.01) -> tuple[Tensor, Tensor]:
    """Drop the rollouts whose mean of w − 1 − log w is above the limit; w = π_old / μ of trainer and engine (verl's
    seq_mean_k3).

    The mean estimates KL(engine ‖ trainer) in nats per token. No term is negative, so errors of opposite sign do not
    cancel as in the geometric mean; like that mean it does not depend on length. It only masks: weights are 1. A NaN is
    dropped.
    """
    distances = mismatch_kl(batch.old_logprobs, batch.behaviour_logprobs)
    return torch.ones_like(distances), batch.to_tokens(batch.mean_of_rollout(distances) <= limit)
