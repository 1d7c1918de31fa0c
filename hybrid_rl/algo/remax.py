from torch import Tensor

from hybrid_rl.algo.batch import Scored

NEEDS = ("greedy", "silent")


def advantages(batch: Scored) -> Tensor:
    """Σ_{s≥t} r_s − r(greedy) → [N]: the baseline is the reward of the task's greedy completion (ReMax, arXiv
    2310.10505).

    r = [1, 0, 0, 0] with a greedy completion of reward 1 gives [0, −1, −1, −1] at all tokens. With penalties (a KL in
    the reward) a token is charged its own and later ones alone; greedy has none. Not relative to the group: one rollout
    a task is enough, and a group of equal rewards has a signal if the greedy completion's differs.
    """
    assert batch.greedy is not None, "remax needs greedy"
    return batch.returns - batch.to_tokens(batch.greedy)
