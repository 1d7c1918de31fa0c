"""Draws tasks without replacement, epoch by epoch; its cursor is all that a checkpoint needs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybrid_rl.types import Group


class Sampler:
    """Indices 0…size−1 in a fresh random order each epoch.

    The state is (epoch, position); the order follows from the seed.
    """

    def __init__(self, size: int, seed: int):
        if size < 1:
            raise ValueError("a sampler needs at least one task")
        self.size, self.seed = size, seed
        self.epoch, self.position = 0, 0
        self._order = self._shuffled()

    def draw(self, count: int, step: int = 0) -> list[int]:
        """Return the next `count` indices, going over into the next epoch when this one ends.

        The step does not matter.
        """
        drawn: list[int] = []
        while len(drawn) < count:
            if self.position == self.size:
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._shuffled()
            take = min(count - len(drawn), self.size - self.position)
            drawn += self._order[self.position : self.position + take]
            self.position += take
        return drawn

    def learn(self, place: int, group: Group) -> None:
        """Learn nothing: the order does not depend on the policy."""

    def numbers(self) -> dict[str, int]:
        return {}

    def state(self) -> dict[str, int]:
        return {"size": self.size, "seed": self.seed, "epoch": self.epoch, "position": self.position}

    def restore(self, state: dict[str, int]) -> None:
        """Restore the order; raise ValueError if the state belongs to another data set or seed."""
        if (state["size"], state["seed"]) != (self.size, self.seed):
            raise ValueError(
                f"the checkpoint's sampler drew from {state['size']} tasks with seed {state['seed']}, "
                f"this run has {self.size} and {self.seed}"
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._shuffled()

    def _shuffled(self) -> Sequence[int]:
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.size).tolist()
