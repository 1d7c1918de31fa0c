"""Call the parts of an algorithm that a configuration names; algo/batch.py says what each gets and returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from hydra.utils import instantiate
from torch import Tensor

from hybrid_rl.algo.batch import Given, Scored, Tokens
from hybrid_rl.algo.contract import look_of
from hybrid_rl.algo.kl import ESTIMATORS
from hybrid_rl.algo.ratio import quantiles
from hybrid_rl.config import AlgoConfig


class Parts:
    """The functions that `algo` names, with their arguments."""

    def __init__(self, algo: AlgoConfig):
        self.advantages = instantiate(algo.advantage, _partial_=True)
        self.aggregate = instantiate(algo.aggregation, _partial_=True)
        self.corrections = [instantiate(part, _partial_=True) for part in algo.correction.values()]
        self.selections = [instantiate(part, _partial_=True) for part in algo.selection.values()]
        self.look = look_of(algo.loss)
        self.kl = ESTIMATORS[algo.kl.estimator.value]

    def advantage(self, scored: Scored) -> tuple[Tensor, Tensor | None]:
        """Return the advantage of each token [N], and with a critic the targets of its values [N]."""
        result = self.advantages(scored)
        advantages, targets = result if isinstance(result, tuple) else (result, None)
        if advantages.shape == scored.outcomes.shape and advantages.shape != scored.rollout.shape:
            advantages = scored.to_tokens(advantages)
        return advantages, targets

    def correct(self, scored: Scored) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Return the product of all corrections' weights [N], the tokens that all keep [N] bool, and statistics."""
        weights, kept = torch.ones_like(scored.old_logprobs), scored.to_tokens(scored.kept)
        for correct in self.corrections:
            own, keeps = correct(scored)
            weights, kept = weights * own, kept & keeps
        if not self.corrections:
            return weights, kept, {}
        raw = quantiles(scored.old_logprobs - scored.behaviour_logprobs)
        numbers = {f"correction_{name}": value for name, value in raw.items()}
        dropped = (~kept | (weights == 0)) & scored.to_tokens(scored.kept)
        return weights, kept, numbers | {"dropped": float(dropped.float().mean())}

    def select(self, minibatch: Tokens) -> tuple[Tensor, Tensor | None]:
        """Return the product of all selections' weights, [M], and the result of the loss's own look, [M] or None."""
        weights = torch.ones_like(minibatch.logprobs)
        for select in self.selections:
            weights = weights * select(minibatch)
        return weights, self.look(minibatch) if self.look else None

    def minibatch(self, given: Given, kept: Tensor, part: range, max_tokens: int) -> tuple[list[int], Given, Tensor]:
        """Return the rollouts of `part` with a kept token, the inputs of their tokens, and which these are, [N] bool.

        `kept` [N] bool are the tokens that a loss sees; the aggregation weights them.
        """
        alive = set(given.rollout[kept].tolist())
        members = [i for i in part if i in alive]
        # dropped rollouts too: a divisor may count them
        inside = (given.rollout >= part.start) & (given.rollout < part.stop)
        weights = torch.zeros_like(given.weights)
        weights[inside], divisor = self.aggregate(kept[inside], given.rollout[inside], max_tokens)
        chosen = torch.isin(given.rollout, torch.tensor(members, dtype=torch.int64, device=kept.device))
        return members, replace(given, weights=weights, divisor=divisor).part(chosen), chosen


def split(group_sizes: Sequence[int], minibatches: int) -> list[range]:
    """Split a batch's rollouts into parts with equal numbers of whole groups, in order; the last may have fewer."""
    ends, size = [0, *accumulate(group_sizes)], max(1, -(-len(group_sizes) // minibatches))
    return [range(ends[i], ends[min(i + size, len(group_sizes))]) for i in range(0, len(group_sizes), size)]
