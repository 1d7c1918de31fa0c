from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from hybrid_rl.algo.batch import Scored
from hybrid_rl.algo.ratio import log_ratio

NEEDS = ("teacher_logprobs", "silent")
BOUNDS = {"limit": (1e-6, 20)}
Reward = Callable[[Scored], Tensor]


def refuses(own: dict[str, Any], run: Any) -> Iterator[tuple[str, str]]:
    if not own["reward"]:
        unseen = "changes the reward, which algo.advantage does not use; set algo.advantage.reward, or leave it out"
        if run.algo.kl.coef and run.algo.kl.place.name == "reward":
            yield "algo.kl.place", unseen
        if run.algo.overlong_share:
            yield "algo.overlong_share", unseen


def advantages(batch: Scored, weight: float = 1.0, reward: Reward | None = None) -> Tensor:
    """weight · (log π_teacher − log π_behaviour) at each sampled token → [N], plus an advantage of the rewards if
    `reward` gives one.

    On-policy distillation (arXiv 2306.13649 with the reverse KL): the mean is −KL(behaviour ‖ teacher). It uses the
    log-probabilities of the policy that sampled the token, not the old ones, which the trainer may recompute. Clamped
    to ±20 nats: a token that the teacher rules out gives −20. `reward`: another estimator, as a nested partial, whose
    [R] or [N] is added. Log-probabilities −1 and −3 give 2.
    """
    return _with_reward(weight * _distances(batch), batch, reward)


def centered(batch: Scored, weight: float = 1.0, reward: Reward | None = None, limit: float = 5.0) -> Tensor:
    """As `advantages`, clamped to ±limit nats (20 at most) and less its mean over the batch's tokens.

    Far from the teacher nearly every token is below 0, so that even the right ones become less likely; with the mean as
    a baseline the right ones are above 0. Distances 1, −9, 0 at limit 5: 7/3, −11/3, 4/3.
    """
    clamped = _distances(batch).clamp(-limit, limit)
    return _with_reward(weight * (clamped - clamped.mean()), batch, reward)


def _distances(batch: Scored) -> Tensor:
    assert batch.teacher_logprobs is not None, "opd needs teacher_logprobs"
    return log_ratio(batch.teacher_logprobs, batch.behaviour_logprobs)


def _with_reward(advantage: Tensor, batch: Scored, reward: Reward | None) -> Tensor:
    if reward is None:
        return advantage
    extra = reward(batch)
    return advantage + (batch.to_tokens(extra) if extra.shape == batch.outcomes.shape else extra)
