"""The order of RL's tasks: shares of sources, and states that go on exactly."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.config import DataConfig
from hybrid_rl.data import DataError
from hybrid_rl.data.draws import Draws, make_draws
from hybrid_rl.data.sampler import Sampler
from hybrid_rl.types import Task


def tasks(**sizes: int) -> list[Task]:
    """Tasks of several sources, in turns."""
    places = sorted((i, source) for source, size in sizes.items() for i in range(size))
    return [Task(f"{source}{i}", ({"role": "user", "content": "x"},), "", source=source) for i, source in places]


def order(given: list[Task], weights: dict[str, float], seed: int, **curriculum: Any) -> Draws:
    return make_draws(given, DataConfig(weights=weights, curriculum=curriculum), seed, 4)


WEIGHTS = st.dictionaries(st.sampled_from("abcde"), st.tuples(st.integers(1, 9), st.floats(0.01, 100)), min_size=1)
COUNTS = st.lists(st.integers(1, 9), min_size=1, max_size=40)


@given(WEIGHTS, COUNTS)
def test_each_source_has_its_share_of_draws_at_any_time(sources, counts):
    given = tasks(**{name: size for name, (size, _) in sources.items()})
    draws = order(given, {name: weight for name, (_, weight) in sources.items()}, 3)
    whole, seen, drawn = sum(weight for _, weight in sources.values()), Counter[str](), []
    for count in counts:
        places = draws.draw(count, 1)
        assert len(places) == count
        drawn += places
        seen.update(given[i].source for i in places)
        for name, (_, weight) in sources.items():
            behind = weight / whole * seen.total() - seen[name]
            assert -1 - 1e-9 < behind < max(1, len(sources) - 1) + 1e-9
    for name, (size, _) in sources.items():  # inside a source every epoch holds every task once
        own = [i for i in drawn if given[i].source == name]
        for start in range(0, len(own) - size + 1, size):
            assert len(set(own[start : start + size])) == size


def test_the_numbers_of_all_sources_are_summed_zeros_included():
    draws = order(tasks(a=2, b=3), {"a": 1, "b": 1}, 0, _target_="hybrid_rl.data.curriculum.pass_rate")
    assert draws.numbers() == {"never": 0, "sometimes": 0, "always": 0, "not_drawn": 5}


@given(WEIGHTS, COUNTS, COUNTS)
def test_a_restored_mixture_goes_on_where_it_stood(sources, before, after):
    given, weights = tasks(**{n: s for n, (s, _) in sources.items()}), {n: w for n, (_, w) in sources.items()}
    one, two = order(given, weights, 3), order(given, weights, 3)
    for count in before:
        one.draw(count, 1)
    two.restore(json.loads(json.dumps(one.state())))
    assert [one.draw(count, 1) for count in after] == [two.draw(count, 1) for count in after]


def first(draws: Draws) -> list[int]:
    return draws.draw(40, 1)


def test_a_mixture_s_order_follows_from_the_seed():
    given = tasks(a=20, b=20)
    assert first(order(given, {"a": 1, "b": 1}, 0)) == first(order(given, {"a": 5, "b": 5}, 0))
    assert first(order(given, {"a": 1, "b": 1}, 0)) != first(order(given, {"a": 1, "b": 1}, 1))
    own = [
        [int(given[i].id[1:]) for i in first(order(given, {"a": 1, "b": 1}, 0)) if given[i].source == s] for s in "ab"
    ]
    assert own[0] != own[1]  # sources of one size have orders of their own
    assert first(order(given, {}, 0)) == Sampler(40, 0).draw(40)


def test_weights_name_exactly_the_sources():
    with pytest.raises(
        DataError, match=r"^data.weights: names no weight for the source b; the sources are a, b, and each"
    ):
        order(tasks(a=1, b=1), {"a": 1}, 0)
    with pytest.raises(DataError, match="no task of the rl set is of the source c; the sources are a, b"):
        order(tasks(a=1, b=1), {"a": 1, "b": 1, "c": 1}, 0)
    with pytest.raises(ValueError, match="the checkpoint drew from a, this run has a, b"):
        order(tasks(a=1, b=1), {"a": 1, "b": 1}, 0).restore(order(tasks(a=1), {"a": 1}, 0).state())
