"""The order in which RL draws its tasks. Every rank draws alike, and all that decides the order is in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

from hybrid_rl.data.sampler import Sampler
from hybrid_rl.data.tasks import DataError
from hybrid_rl.types import Task


class Draws(Protocol):
    """An order of tasks; Sampler is the plainest. `state` holds values of JSON alone."""

    def draw(self, count: int) -> list[int]:
        """Return the places of the next `count` tasks."""

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

    def draw(self, count: int) -> list[int]:
        """Return the places of the next `count` tasks, those of each pool in the pool's order."""
        chosen = [self._next_pool() for _ in range(count)]
        drawn = {pool: iter(pool.draws.draw(chosen.count(pool))) for pool in dict.fromkeys(chosen)}
        return [pool.places[next(drawn[pool])] for pool in chosen]

    def _next_pool(self) -> Pool:
        total = 1 + sum(pool.drawn for pool in self.pools.values())
        pool = max(self.pools.values(), key=lambda pool: pool.share * total - pool.drawn)  # the first of several
        pool.drawn += 1
        return pool

    def state(self) -> dict[str, Any]:
        return {name: {"drawn": pool.drawn, "draws": pool.draws.state()} for name, pool in self.pools.items()}

    def restore(self, state: dict[str, Any]) -> None:
        if state.keys() != self.pools.keys():
            raise ValueError(f"the checkpoint drew from {', '.join(state)}, this run has {', '.join(self.pools)}")
        for name, pool in self.pools.items():
            pool.drawn = state[name]["drawn"]
            pool.draws.restore(state[name]["draws"])


def make_draws(tasks: Sequence[Task], weights: Mapping[str, float], seed: int) -> Draws:
    """Return the order in which RL draws `tasks`: one pool, or with data.weights one for each source.

    Raises DataError for weights that do not name exactly the sources of the tasks.
    """
    if not weights:
        return Sampler(len(tasks), seed)
    sources: dict[str, list[int]] = {}
    for place, task in enumerate(tasks):
        sources.setdefault(task.source or "unnamed", []).append(place)
    if odd := sorted(weights.keys() ^ sources.keys()):
        problem = (
            f"no task of the rl set is of the source {odd[0]}"
            if odd[0] in weights
            else f"names no weight for the source {odd[0]}"
        )
        raise DataError(f"data.weights: {problem}; the sources are {', '.join(sorted(sources))}, and each needs one")
    whole = sum(weights.values())
    return Mixture(
        {
            name: Pool(weights[name] / whole, places, Sampler(len(places), _seed(seed, name)))
            for name, places in sorted(sources.items())
        }
    )


def _seed(seed: int, source: str) -> int:
    """Return a seed for a source's pool, so that pools of one size have orders of their own."""
    return int.from_bytes(sha256(f"{seed} {source}".encode()).digest()[:7])
