from torch import Tensor

from hybrid_rl.algo.batch import Scored

NEEDS = ("greedy",)


def advantages(batch: Scored) -> Tensor:
    """r − r(greedy) → [R]: the baseline is what the task's greedy completion was paid (ReMax, arXiv 2310.10505).

    r = [1, 0, 0, 0] with a greedy completion paid 1 gives [0, −1, −1, −1]. Not relative to the group: one rollout a task is enough,
    and a group of equal rewards has a signal where greedy was paid differently. Penalties are the rollout's alone: greedy has none.
    """
    assert batch.greedy is not None, "remax needs greedy"
    return batch.rewards - batch.greedy
