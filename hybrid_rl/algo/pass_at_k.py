from collections.abc import Iterator
from math import comb
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.algo.batch import Scored
from hybrid_rl.algo.grpo import relative
from hybrid_rl.algo.sums import cumsum

NEEDS = ("group",)


def refuses(own: dict[str, Any], run: Any) -> Iterator[tuple[str, str]]:
    if not 2 <= own["k"] <= run.rollout.group_size:
        yield "k", f"must be from 2 to rollout.group_size={run.rollout.group_size}"


def advantages(batch: Scored, k: int = 4) -> Tensor:
    """Mean of max_S r − max_{S∖i} r over all sets S ∋ i of k rollouts of the group → [R]: what i adds to the best of k.

    PKPO's leave-one-out of k − 1 (arXiv 2505.15201, eq. 33) times G/k; with k = G, r_best − r_second for the best and 0
    for the others. Never negative. r = [3, 1, 0, 0], k = 2 gives [8/3, 2/3, 0, 0]; [1, 0, 0, 0] gives [1, 0, 0, 0] for
    every k. A tie of the best, k = G: 0.
    """
    return relative(batch, lambda r: _added(r, k))


def _added(rewards: Tensor, k: int) -> Tensor:
    # In ascending order, rollout i gains the gap between the m-th reward and the next one below it if its k − 1
    # companions are all among the m lowest: with chance C(m, k−1) / C(G−1, k−1). With gaps instead of rewards, ties
    # give exactly 0, and nothing cancels.
    ascending, order = rewards.sort()
    size = len(rewards)
    chances = [comb(m, k - 1) / comb(size - 1, k - 1) for m in range(1, size)]
    added = torch.zeros_like(rewards)
    added[order[1:]] = cumsum(ascending.diff() * torch.tensor(chances, dtype=rewards.dtype, device=rewards.device))
    return added
