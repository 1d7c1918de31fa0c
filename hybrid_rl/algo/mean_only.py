from torch import Tensor


def advantages(rewards: Tensor) -> Tensor:
    """r − μ over a group's rewards [G] → [G]: Dr.GRPO's estimator, without division by the spread.

    r = [1, 0, 0, 0] gives [0.75, −0.25, −0.25, −0.25]. A single rollout has nothing to be compared with: 0.
    """
    return rewards - rewards.mean()
