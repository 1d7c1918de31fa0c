"""Orders of RL's tasks that change with the step or with the policy's pass rates."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.config import DataConfig
from hybrid_rl.data import DataError
from hybrid_rl.data.curriculum import PassRates
from hybrid_rl.data.draws import Draws, make_draws
from hybrid_rl.data.sampler import Sampler
from hybrid_rl.types import Group, Rollout, Task

MODULE = "hybrid_rl.data.curriculum."


def tasks(levels: list[Any], sources: str = "") -> list[Task]:
    return [
        Task(f"t{i}", ({"role": "user", "content": "x"},), "", source=sources[i % len(sources)] if sources else "", columns={"level": level})
        for i, level in enumerate(levels)
    ]  # fmt: skip


def order(
    given: list[Task], name: str, at_least: int = 4, weights: dict[str, float] | None = None, **arguments: Any
) -> Draws:
    data = DataConfig(curriculum={"_target_": MODULE + name, **arguments}, weights=weights or {})
    return make_draws(given, data, 5, at_least)


def scored(rewards: list[float | None]) -> Group:
    rollouts = [Rollout("t", 0, i, 0, [1]) for i in range(len(rewards))]
    for rollout, reward in zip(rollouts, rewards, strict=True):
        if reward is not None:
            rollout.score(reward, {})
    return Group(0, Task("t", ({"role": "user", "content": "?"},), ""), rollouts)


# ---- fixed orders ------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 20), st.integers(1, 8))
def test_easiest_first_allows_the_easiest_share(levels, steps, at_least):
    draws = order(tasks(levels), "easiest_first", at_least, column="level", steps=steps)
    for step in range(1, steps + 2):
        drawn = draws.draw(at_least, step)
        most = max(min(at_least, len(levels)), len(levels) * min(1, step / steps))
        assert all(sum(other < levels[i] for other in levels) < most for i in drawn)
    assert Counter(draws.draw(10 * len(levels), steps)).keys() == set(range(len(levels)))  # then all of them


def test_stages_begin_with_their_steps():
    draws = order(tasks(["1", 2, 3.0, 4] * 5), "stages", column="level", limits={1: 1, 3: 3, 10: None})
    allowed = {step: {i % 4 + 1 for i in draws.draw(60, step)} for step in (1, 2, 3, 9, 10, 50)}
    assert allowed == {1: {1}, 2: {1}, 3: {1, 2, 3}, 9: {1, 2, 3}, 10: {1, 2, 3, 4}, 50: {1, 2, 3, 4}}


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("easiest_first", {"column": "level", "steps": 0}, "data.curriculum.steps=0: must be at least 1"),
        ("easiest_first", {"column": "size", "steps": 3}, "data.curriculum.column=size: task t0 has None there and not a number (it has level)"),
        ("stages", {"column": "level", "limits": {2: 1}}, "data.curriculum.limits={2: 1}: must be limits by the step"),
        ("stages", {"column": "level", "limits": {1: 0}}, "data.curriculum.limits.1=0: no task has so little in 'level'; the least is 1"),
        ("pass_rate", {"floor": 0}, "data.curriculum.floor=0: must be above 0, at most 1"),
        ("pass_rate", {"memory": 1}, "data.curriculum.memory=1: must be from 0 to below 1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(name, arguments, expected):
    with pytest.raises(DataError) as raised:
        order(tasks([1, 2]), name, **arguments)
    assert str(raised.value).startswith(expected)


# ---- the policy's pass rate ---------------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 9))
def test_a_step_draws_each_task_once_before_one_twice(size, counts, step):
    draws = PassRates(size, 0, 0.05, 0.5, 1.0)
    drawn = [i for count in counts for i in draws.draw(count, step)]
    assert len(drawn) == sum(counts)
    assert max(Counter(drawn).values()) == -(-len(drawn) // size)


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.floats(0, 1), min_size=1, max_size=4)), max_size=8),
    st.booleans(),
)
def test_pass_rates_go_on_to_the_bit(size, steps, mixed):
    given = tasks([1] * 2 * size, "ab")
    weights = {"a": 2.0, "b": 1.0} if mixed else None
    one, two = (order(given, "pass_rate", weights=weights) for _ in range(2))

    def take(draws: Draws, first: int) -> list[int]:
        places = []
        for step, (count, rewards) in enumerate(steps, first):
            for _ in range(2):  # a round of replacements too
                drawn = draws.draw(count, step)
                for place in drawn:
                    draws.learn(place, scored(rewards))
                places += drawn
        return places

    take(one, 1)
    two.restore(json.loads(json.dumps(one.state())))
    assert take(one, 50) == take(two, 50)
    assert one.state() == two.state()
    assert one.numbers() == two.numbers()


def test_a_pass_rate_is_a_running_mean_of_shares():
    draws = PassRates(4, 0, 0.1, 0.75, 0.5)
    draws.learn(2, scored([1.0, 0.5, 0.0, None]))
    assert draws.rates == {2: 2 / 3}
    draws.learn(2, scored([0.0, 0.0]))
    draws.learn(3, scored([None]))
    draws.learn(0, scored([0.1]))
    assert draws.rates == {2: pytest.approx(0.5), 0: 0.0}
    assert draws.weights().tolist() == pytest.approx([0.1, 1.0, 1.0, 1.0])
    assert draws.numbers() == {"never": 1, "sometimes": 1, "always": 0, "not_drawn": 2}


def test_draws_follow_the_weights():
    """The first of 20,000 weighted draws: frequencies are the weights' shares, within 4 standard errors."""
    draws = PassRates(4, 1, 0.05, 0.0, 1.0)
    for place, rate in enumerate((0.0, 0.25, 0.5, 1.0)):
        draws.rates[place] = rate
    shares = draws.weights() / draws.weights().sum()
    assert draws.weights().tolist() == pytest.approx([0.05, 0.05 + 0.95 * 0.75, 1.0, 0.05])
    seen = np.bincount([draws.draw(1, step)[0] for step in range(20_000)], minlength=4) / 20_000
    assert np.abs(seen - shares).max() < 4 * 0.5 / 20_000**0.5


def silent_share(draws: Draws, solves: list[float], steps: int, seed: int = 0) -> float:
    """The share of groups of 8 without a signal, if task i is solved with probability solves[i]; each is replaced up to 4 times."""
    chance, silent, groups = random.Random(seed), 0, 0
    for step in range(1, steps + 1):
        missing = 8
        for _ in range(5):
            places = draws.draw(missing, step)
            for place in places:
                rewards = [float(chance.random() < solves[place]) for _ in range(8)]
                draws.learn(place, scored(rewards))
                missing -= 0 < sum(rewards) < 8
            groups += len(places)
        silent += missing
    return (groups - (8 * steps - silent)) / groups


def test_most_groups_have_a_signal_when_few_tasks_do():
    """Of 400 tasks 80 % are always or never solved: epochs draw silent groups at that rate, pass rates after a while at half."""
    solves = [0.0] * 160 + [1.0] * 160 + [0.5] * 80
    random.Random(1).shuffle(solves)
    plain = silent_share(Sampler(400, 0), solves, 60)
    better = silent_share(PassRates(400, 0, 0.05, 0.5, 1.0), solves, 60)
    assert 0.75 < plain < 0.85
    assert better < 0.55
