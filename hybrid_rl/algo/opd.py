from collections.abc import Callable

from torch import Tensor

from hybrid_rl.algo.batch import Scored
from hybrid_rl.algo.ratio import log_ratio

NEEDS = ("teacher_logprobs",)


def advantages(batch: Scored, weight: float = 1.0, reward: Callable[[Scored], Tensor] | None = None) -> Tensor:
    """weight · (log π_teacher − log π_behaviour) at each sampled token → [N], plus an advantage of the rewards where `reward` gives one.

    On-policy distillation (arXiv 2306.13649 with the reverse KL): the mean is −KL(behaviour ‖ teacher). It is of the policy that sampled
    the token, hence behaviour and not old log-probabilities, which the trainer recomputes. Clamped to ±20 nats: a teacher that gives a
    token no chance yields −20. `reward`: another estimator, as a nested partial; its [R] or [N] is added. log-probs −1 and −3: 2.
    """
    assert batch.teacher_logprobs is not None, "opd needs teacher_logprobs"
    advantage = weight * log_ratio(batch.teacher_logprobs, batch.behaviour_logprobs)
    if reward is None:
        return advantage
    extra = reward(batch)
    return advantage + (batch.to_tokens(extra) if extra.shape == batch.outcomes.shape else extra)
