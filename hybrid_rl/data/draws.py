"""The order in which RL draws its tasks. Every rank draws alike, and all that decides the order is in a checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol, cast

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from hybrid_rl.config import DataConfig
from hybrid_rl.data.sampler import Sampler
from hybrid_rl.data.tasks import DataError, told
from hybrid_rl.types import Group, Task


class Draws(Protocol):
    """An order of tasks; Sampler is the plainest. `state` holds values of JSON alone."""

    def draw(self, count: int, step: int) -> list[int]:
        """Return the places of the next `count` tasks for RL step `step`; a step may draw several times."""

    def learn(self, place: int, group: Group) -> None:
        """Learn from the scored group of the task at `place`."""

    def numbers(self) -> dict[str, int]:
        """Return what metrics show of the order, {} for nothing."""

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on with the same draws."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state. Raises ValueError or KeyError if it is of other tasks."""


@dataclass(slots=True, eq=False)
class Pool:
    """The tasks of one source, by their places, with an order of their own."""

    share: float  # of all draws
    places: Sequence[int]
    draws: Draws
    drawn: int = 0


class Mixture:
    """Draws from the pool that is furthest behind its share of all draws so far.

    After n draws a pool of share s has been drawn less than s·n + 1 times, and more than s·n − (pools − 1). Groups that
    replace silent ones are draws too, so shares hold for all of them together.
    """

    def __init__(self, pools: Mapping[str, Pool]):
        self.pools = dict(pools)
        self._own = {place: (pool, i) for pool in self.pools.values() for i, place in enumerate(pool.places)}

    def draw(self, count: int, step: int) -> list[int]:
        """Return the places of the next `count` tasks, those of each pool in the pool's order."""
        chosen = [self._next_pool() for _ in range(count)]
        drawn = {pool: iter(pool.draws.draw(chosen.count(pool), step)) for pool in dict.fromkeys(chosen)}
        return [pool.places[next(drawn[pool])] for pool in chosen]

    def _next_pool(self) -> Pool:
        total = 1 + sum(pool.drawn for pool in self.pools.values())
        pool = max(self.pools.values(), key=lambda pool: pool.share * total - pool.drawn)  # the first of several
        pool.drawn += 1
        return pool

    def learn(self, place: int, group: Group) -> None:
        pool, own = self._own[place]
        pool.draws.learn(own, group)

    def numbers(self) -> dict[str, int]:
        total = Counter[str]()
        for pool in self.pools.values():
            total.update(pool.draws.numbers())  # the sum of two counters drops zeros
        return dict(total)

    def state(self) -> dict[str, Any]:
        return {name: {"drawn": pool.drawn, "draws": pool.draws.state()} for name, pool in self.pools.items()}

    def restore(self, state: dict[str, Any]) -> None:
        if state.keys() != self.pools.keys():
            raise ValueError(f"the checkpoint drew from {', '.join(state)}, this run has {', '.join(self.pools)}")
        for name, pool in self.pools.items():
            pool.drawn = state[name]["drawn"]
            pool.draws.restore(state[name]["draws"])


def make_draws(tasks: Sequence[Task], data: DataConfig, seed: int, at_least: int) -> Draws:
    """Return the order in which RL draws `tasks`: one pool, or with data.weights one for each source.

    `at_least` is the number of tasks that a step begins with. Raises DataError for weights that do not name exactly the
    sources of the tasks, and for a curriculum that does not fit them.
    """
    if not data.weights:
        return _order(tasks, data.curriculum, seed, at_least)
    sources: dict[str, list[int]] = {}
    for place, task in enumerate(tasks):
        sources.setdefault(task.source or "unnamed", []).append(place)
    if odd := sorted(data.weights.keys() ^ sources.keys()):
        none = odd[0] in data.weights
        problem = (
            f"no task of the rl set is of the source {odd[0]}" if none else f"names no weight for the source {odd[0]}"
        )
        raise DataError(f"data.weights: {problem}; the sources are {', '.join(sorted(sources))}, and each needs one")
    whole, pools = sum(data.weights.values()), dict[str, Pool]()
    for name, places in sorted(sources.items()):
        share, own = data.weights[name] / whole, [tasks[place] for place in places]
        order = _order(own, data.curriculum, _seed(seed, name), math.ceil(share * at_least))
        pools[name] = Pool(share, places, order)
    return Mixture(pools)


def _order(tasks: Sequence[Task], curriculum: Mapping[str, Any], seed: int, at_least: int) -> Draws:
    """Return the order inside one pool."""
    if not curriculum:
        return Sampler(len(tasks), seed)
    try:
        return cast(Draws, instantiate(dict(curriculum), tasks, seed, min(at_least, len(tasks)), _convert_="all"))
    except InstantiationException as error:
        cause = error.__cause__ or error
        raise (
            cause
            if isinstance(cause, DataError)
            else DataError(f"data.curriculum._target_={curriculum['_target_']} failed: {told(cause)}")
        ) from error


def _seed(seed: int, source: str) -> int:
    """Return a seed for a source's pool, so that pools of one size have orders of their own."""
    return int.from_bytes(sha256(f"{seed} {source}".encode()).digest()[:7])
