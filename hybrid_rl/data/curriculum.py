"""Orders of tasks other than epoch by epoch: easiest first, in stages, by the policy's own pass rate.

    data: {curriculum: {_target_: hybrid_rl.data.curriculum.pass_rate, floor: 0.05}}

Each function gets the tasks of one pool, a seed, and the number of tasks that a step begins with; its other arguments
are settings. It returns a `Draws`; a function of your own may do the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hybrid_rl.data.sampler import Sampler
from hybrid_rl.data.tasks import DataError
from hybrid_rl.types import Group, Task

KEY = "data.curriculum"


class Growing:
    """Draws in a Sampler's order, passing over what is above the limit of the step; at least the lowest may pass."""

    def __init__(self, levels: Sequence[float], limit: Callable[[int], float], seed: int):
        self.levels, self.limit, self.lowest = levels, limit, min(levels)
        self.sampler = Sampler(len(levels), seed)

    def draw(self, count: int, step: int) -> list[int]:
        limit, drawn = max(self.lowest, self.limit(step)), list[int]()
        while len(drawn) < count:
            drawn += [i for i in self.sampler.draw(count) if self.levels[i] <= limit]
        return drawn[:count]

    def learn(self, place: int, group: Group) -> None:
        """Learn nothing: the order does not depend on the policy."""

    def numbers(self) -> dict[str, int]:
        return {}

    def state(self) -> dict[str, Any]:
        return self.sampler.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.sampler.restore(state)


def easiest_first(tasks: Sequence[Task], seed: int, at_least: int, column: str, steps: int) -> Growing:
    """Draw from the easiest tasks alone at first, and from all of them from step `steps` on.

    In step t those may be drawn that are among the easiest t/steps of the tasks, and always the easiest `at_least`, by
    the number that each has in `column` (small is easy; ties belong together).
    """
    if steps < 1:
        raise DataError(f"{KEY}.steps={steps}: must be at least 1")
    values = _numbers(tasks, column)
    ranks = np.searchsorted(np.sort(values), values).tolist()  # the number of easier tasks

    def limit(step: int) -> float:
        return max(at_least, math.ceil(len(tasks) * min(1.0, step / steps))) - 1

    return Growing(ranks, limit, seed)


def stages(tasks: Sequence[Task], seed: int, at_least: int, column: str, limits: Mapping[int, float | None]) -> Growing:
    """Draw in stages: {1: 2, 50: 4, 100: null} allows tasks with at most 2 in `column` from step 1 on, 4 from step 50 on.

    null allows all. Raises DataError unless the first stage begins with step 1, and for a stage without tasks.
    """
    starts = sorted(limits)
    if not starts or starts[0] != 1 or not all(isinstance(start, int) for start in starts):
        raise DataError(
            f"{KEY}.limits={dict(limits)}: must be limits by the step that each begins with, the first with 1"
        )
    values = _numbers(tasks, column)
    most = {start: math.inf if (limit := limits[start]) is None else float(limit) for start in starts}
    for start, limit in most.items():
        if limit < min(values):
            raise DataError(
                f"{KEY}.limits.{start}={limit:g}: no task has so little in {column!r}; the least is {min(values):g}"
            )
    return Growing(values, lambda step: most[max((s for s in starts if s <= step), default=1)], seed)


def _numbers(tasks: Sequence[Task], column: str) -> list[float]:
    """Return the number of each task in `column`. Raises DataError for a task without one."""
    numbers = []
    for task in tasks:
        value = task.columns.get(column)
        try:
            number = math.nan if isinstance(value, bool) or value is None else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isnan(number):
            there = ", ".join(task.columns) or "no columns"
            raise DataError(
                f"{KEY}.column={column}: task {task.id} has {value!r} there and not a number (it has {there})"
            )
        numbers.append(number)
    return numbers


class PassRates:
    """Draws a task the more often the nearer its running pass rate p is to 1/2, and no task twice in a step.

    The weight of a task is floor + (1 − floor)·4p(1 − p): 1 at p = 1/2, where a group has most signal, and `floor` for
    a task that is always or never solved, whose groups are silent. A task that was not drawn yet counts as p = 1/2. p is
    the share of a group's rollouts with a reward of at least `pass_reward`; later groups move it by 1 − memory of the
    difference.
    """

    def __init__(self, size: int, seed: int, floor: float, memory: float, pass_reward: float):
        self.size, self.seed, self.floor, self.memory, self.pass_reward = size, seed, floor, memory, pass_reward
        self.rates: dict[int, float] = {}  # by place, of the tasks that were drawn
        self.draws = 0  # calls of draw, each with a random stream of its own
        self._step, self._taken = -1, set[int]()  # of the running step: checkpoints are written between steps

    def draw(self, count: int, step: int) -> list[int]:
        if step != self._step:
            self._step, self._taken = step, set()
        drawn: list[int] = []
        while len(drawn) < count:
            if len(self._taken) == self.size:  # a step that needs more tasks than there are
                self._taken = set()
            some = self._weighted(min(count - len(drawn), self.size - len(self._taken)))
            self._taken.update(some)
            drawn += some
        return drawn

    def _weighted(self, count: int) -> list[int]:
        """Draw without replacement, with probabilities by weight, of what this step has not taken.

        Exponential waiting times with the weights as rates: the first `count` to arrive (Efraimidis and Spirakis 2006).
        """
        times = np.random.default_rng([self.seed, self.draws]).exponential(size=self.size) / self.weights()
        times[list(self._taken)] = math.inf
        self.draws += 1
        return [int(i) for i in np.argsort(times, kind="stable")[:count]]

    def weights(self) -> np.ndarray:
        """Return the weight of each task, [size] float64."""
        rates = np.full(self.size, 0.5)
        rates[list(self.rates)] = list(self.rates.values())
        return np.asarray(self.floor + (1 - self.floor) * 4 * rates * (1 - rates))

    def learn(self, place: int, group: Group) -> None:
        """Move the task's pass rate towards that of its newest group. Rewards that failed do not count."""
        outcomes = [r.outcome for r in group.rollouts if r.outcome is not None]
        if outcomes:
            share = sum(outcome >= self.pass_reward - 1e-9 for outcome in outcomes) / len(outcomes)
            before = self.rates.get(place, share)
            self.rates[place] = self.memory * before + (1 - self.memory) * share

    def numbers(self) -> dict[str, int]:
        """Return how many tasks are never, sometimes and always solved, and how many were not drawn yet."""
        rates = list(self.rates.values())
        never, always = sum(rate < 0.05 for rate in rates), sum(rate > 0.95 for rate in rates)
        return {
            "never": never,
            "sometimes": len(rates) - never - always,
            "always": always,
            "not_drawn": self.size - len(rates),
        }

    def state(self) -> dict[str, Any]:
        rates = {str(place): rate for place, rate in self.rates.items()}
        return {"size": self.size, "seed": self.seed, "draws": self.draws, "rates": rates}

    def restore(self, state: dict[str, Any]) -> None:
        if (state["size"], state["seed"]) != (self.size, self.seed):
            raise ValueError(f"its pass rates are of {state['size']} tasks with seed {state['seed']}")
        self.draws, self.rates = state["draws"], {int(place): rate for place, rate in state["rates"].items()}


def pass_rate(
    tasks: Sequence[Task],
    seed: int,
    at_least: int,
    floor: float = 0.05,
    memory: float = 0.5,
    pass_reward: float = 1.0,
) -> PassRates:
    """Draw tasks by the policy's own pass rate, those that it sometimes solves most often: see PassRates."""
    for name, value, good in (("floor", floor, 0 < floor <= 1), ("memory", memory, 0 <= memory < 1)):
        if not good:
            raise DataError(
                f"{KEY}.{name}={value}: must be {'above 0, at most 1' if name == 'floor' else 'from 0 to below 1'}"
            )
    return PassRates(len(tasks), seed, floor, memory, pass_reward)
