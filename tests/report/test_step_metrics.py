"""A step's numbers against brute force, and alarms that come when they should, once, and not when they should not."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.report.alarms import CALM, FIRST, Alarms
from hybrid_rl.report.phases import Phases
from hybrid_rl.report.step_metrics import pass_at_k, phase_metrics, repetition, rollout_metrics
from hybrid_rl.rollout.collector import Batch
from hybrid_rl.rollout.partial import Partial
from hybrid_rl.types import Group, Rollout, Task

# A run of the reverse recipe that learns well: its entropy, step by step.
GOOD_ENTROPY = [
    1.765,
    1.532,
    1.402,
    1.255,
    1.077,
    0.96,
    0.86,
    0.76,
    0.70,
    0.684,
    0.62,
    0.58,
    0.52,
    0.47,
    0.45,
    0.44,
    0.41,
    0.39,
    0.37,
    0.358,
]


def rollout(sampled: Iterable[int], observed: Iterable[int] = (), group: int = 0, index: int = 0) -> Rollout:
    """A prompt, half of the sampled tokens, what a tool said, the other half."""
    made, tokens, observed = Rollout("t", group, index, 0, [1, 1, 1, 1, 1, 1]), list(sampled), list(observed)
    for segment in (tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]):
        made.add_sampled(segment, [-1.0] * len(segment), [(0, len(segment))])
        made.add_observed(observed)
        observed = []
    return made


def group(
    id: int,
    rewards: list[float | None],
    source: str = "",
    lengths: Iterable[int] = (),
    parts: dict[str, list[float]] = {},  # noqa: B006
) -> Group:
    made = []
    for index, (reward, length) in enumerate(zip(rewards, lengths or [3] * len(rewards), strict=True)):
        r = rollout(range(length), group=id, index=index)
        r.finish("length" if length > 5 else "stop", "")
        if reward is None:
            r.error = "TimeoutError"
        else:
            r.score(reward, {name: values[index] for name, values in parts.items()})
        made.append(r)
    return Group(id, Task("t", ({"role": "user", "content": "?"},), "", source=source), made)


# ---- numbers of a step ------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([0, 1, 2, 65535, 65536, 2**31 - 1]), max_size=60), st.lists(st.just(0), max_size=6))
def test_repetition_is_the_share_of_4_grams_seen_before(sampled: list[int], observed: list[int]) -> None:
    grams = [tuple(sampled[i : i + 4]) for i in range(len(sampled) - 3)]
    expected = sum(gram in grams[:i] for i, gram in enumerate(grams)) / len(grams) if grams else 0.0
    assert repetition(rollout(sampled, observed)) == pytest.approx(expected, abs=1e-12)


def test_repetition_of_texts_one_can_count() -> None:
    assert repetition(rollout(range(1000))) == 0
    assert repetition(rollout([0, 65536, 5, 5, 9, 1, 0, 5, 5])) == 0, "ids are told apart above 16 bits"
    assert repetition(rollout([7] * 4)) == 0
    assert repetition(rollout([7] * 5)) == 1 / 2
    assert repetition(rollout([1, 2, 3, 4, 5] * 2)) == 2 / 7
    assert repetition(rollout([1, 2] * 500)) == 995 / 997


def test_the_numbers_of_a_steps_rollouts() -> None:
    kept = group(0, [1.0, 0.0, None], "math", [10, 3, 2], {"format": [1.0, 1.0, 1.0], "truth": [1.0, 0.0, 0.0]})
    silent = group(1, [0.5, 0.5, 0.5], "code", [3, 3, 3], {"format": [1.0, 1.0, 1.0]})
    batch = Batch([silent], [kept], missing_groups=2, silent_groups=3, reward_errors=1, replacement_rounds=4)
    batch.reward_faults = Counter({("math", "timeout"): 1, ("math", "died"): 1, ("code", "timeout"): 2})
    assert rollout_metrics(batch) == {
        "reward": 0.5, "reward_std": pytest.approx(math.sqrt(0.1)), "reward_min": 0.0, "reward_max": 1.0,
        "parts": {"format": 1.0, "truth": 0.2}, "parts_std": {"format": 0.0, "truth": pytest.approx(0.4)},
        "sources": {"code": 0.5, "math": 0.5}, "groups_drawn": {"code": 1, "math": 1}, "groups_kept": {"code": 1},
        "length": 4.0, "length_max": 10, "truncated": pytest.approx(1 / 6), "repetition": 0.0,
        "rollouts": 3, "silent_groups": 3, "missing_groups": 2, "replacement_rounds": 4, "reward_errors": 1,
        "reward_faults": {"timeout": 3, "died": 1}, "source_faults": {"code": 2, "math": 2},
    }  # fmt: skip
    batch.dropped[0].rollouts[0] = rollout([1] * 10)
    assert rollout_metrics(batch)["repetition"] == pytest.approx(6 / 7 / 6)


def test_reward_by_source() -> None:
    first, second = group(0, [1.0, None]), group(1, [0.0, 0.5], "b")
    assert rollout_metrics(Batch([first, second]))["sources"] == {"unnamed": 1.0, "b": 0.25}
    assert list(rollout_metrics(Batch([first, second]))["sources"]) == ["b", "unnamed"]
    assert "sources" not in rollout_metrics(Batch([second, group(2, [0.0], "b")]))


def test_rewards_at_the_end_of_floats_have_a_mean_and_a_spread() -> None:
    made = rollout_metrics(
        Batch(
            [
                group(0, [1.5e308, -1.5e308, 1.5e308, 1.5e308], "a", parts={"x": [1.5e308] * 4}),
                group(1, [1.5e308] * 4, "b"),
            ]
        )
    )
    assert made["reward"] == pytest.approx(1.125e308)
    assert made["reward_std"] == pytest.approx(1.5e308 * (math.sqrt(7) / 4))
    assert (made["parts"], made["parts_std"]) == ({"x": pytest.approx(7.5e307)}, {"x": pytest.approx(7.5e307)})
    assert made["sources"] == {"a": pytest.approx(7.5e307), "b": 1.5e308}


class TwoRanks:
    def __init__(self, other: Phases):
        self.other = other

    def all_gather(self, mine: Phases) -> list[Phases]:
        return [mine, self.other]


def test_the_numbers_of_a_steps_phases_are_the_slowest_and_largest_ranks() -> None:
    mine, other = Phases(torch.device("cpu")), Phases(torch.device("cpu"))
    mine.seconds, mine.memory = {"rollout": 1.0, "update": 3.0}, {"rollout": (1.0, 2.0), "update": (5.0, 1.0)}
    other.seconds, other.memory = {"rollout": 4.0, "update": 1.0}, {"rollout": (2.0, 1.0), "update": (1.0, 1.0)}
    assert phase_metrics(
        mine, Batch([group(0, [1.0], lengths=[4])], [group(1, [1.0], lengths=[6])]), TwoRanks(other)
    ) == {  # type: ignore[arg-type]
        "seconds": {"rollout": 4.0, "update": 3.0},
        "memory": {"rollout": [2.0, 2.0], "update": [5.0, 1.0]},
        "memory_gib": 5.0,
        "memory_reserved_gib": None,
        "memory_device_gib": None,
        "tokens_per_second": 10 / 5,
    }


def test_tokens_a_second_are_those_sampled_in_the_step() -> None:
    """Groups under way were sampled too, and what an earlier step sampled was not."""
    mine = Phases(torch.device("cpu"))
    mine.seconds, mine.memory = {"rollout": 2.0}, {"rollout": (1.0, 1.0)}
    batch = Batch(
        [group(0, [1.0], lengths=[4])], [group(1, [1.0], lengths=[6])], partial=Partial(3, 5, 6, 7, tokens=50)
    )
    assert phase_metrics(mine, batch, TwoRanks(mine))["tokens_per_second"] == 25  # type: ignore[arg-type]
    made = rollout_metrics(batch)
    assert (made["lag"], made["lag_mean"]) == ({"3": 1.0}, 3.0)
    assert [made[f"{name}_rollouts"] for name in ("continued", "discarded")] == [5, 6]
    assert made["groups_left"] == 7


def test_what_torch_and_all_processes_hold_is_the_largest_ranks() -> None:
    mine, other = Phases(torch.device("cpu")), Phases(torch.device("cpu"))
    for phases, reserved, device in ((mine, 3.0, 20.0), (other, 4.0, 10.0)):
        phases.seconds, phases.memory = {"update": 1.0}, {"update": (1.0, 2.0)}
        phases.reserved_gib, phases.device_gib = reserved, device
    made = phase_metrics(mine, Batch([group(0, [1.0], lengths=[4])], []), TwoRanks(other))  # type: ignore[arg-type]
    assert (made["memory_gib"], made["memory_reserved_gib"], made["memory_device_gib"]) == (2.0, 4.0, 20.0)


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_counts_draws(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            draws = list(combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-15)


@given(st.integers(1, 3000), st.data())
def test_pass_at_k_of_many_samples(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    missed = math.prod(1 - k / i for i in range(n - c + 1, n + 1)) if n - c >= k else 0.0  # as Chen et al. print it
    assert pass_at_k(n, c, k) == pytest.approx(1 - missed, abs=1e-9)
    assert pass_at_k(n, c, 1) == c / n


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 5), (4, 2, 0), (0, 0, 1), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_of_what_cannot_be(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=str(k) if k != 1 or n == 0 else "cannot be correct"):
        pass_at_k(n, c, k)


# ---- alarms -----------------------------------------------------------------------------------------------------------


def sound(**changes: object) -> dict[str, object]:
    """A step that nothing is wrong with."""
    return {
        "reward": 0.5, "reward_std": 0.3, "parts": {"format": 0.9, "truth": 0.4}, "parts_std": {"format": 0.1, "truth": 0.2},
        "truncated": 0.1, "repetition": 0.05, "rollouts": 128, "entropy": 0.5, "mismatch_kl": 2e-4,
    } | changes  # fmt: skip


def begun(steps: Iterable[dict[str, object]], alarms: Alarms | None = None) -> list[tuple[int, str]]:
    """(step from 1, short name) of every alarm."""
    alarms = alarms or Alarms()
    return [(number, name) for number, values in enumerate(steps, 1) for name in alarms.check(values)]


def course(key: str, values: Iterable[object]) -> list[dict[str, object]]:
    return [sound(**{key: value}) for value in values]


def test_a_run_that_learns_well_gives_no_alarm() -> None:
    shares = [0.02, 0.05, 0.49, 0.1] * 5
    steps = [
        sound(entropy=e, mismatch_kl=1e-12, truncated=t, repetition=t)
        for e, t in zip(GOOD_ENTROPY, shares, strict=True)
    ]
    assert begun(steps) == []


@pytest.mark.parametrize(
    ("entropy", "expected"),
    [
        ([1.77, 1.2, 0.8, 0.2, 0.051], []),
        ([1.77, 1.2, 0.8, 0.2, 0.049, 0.01], [(5, "entropy")]),
        ([1.77, 0.01], [(2, "entropy")]),
        ([0.2, 0.2, 0.2, 0.2, 0.2, 0.021, 0.019], [(7, "entropy")]),  # a policy that begins sure: a tenth counts
        ([0.03] * 9, []),
        ([0.01] * 9, []),
        (
            [0.4] * 5 + [0.1] * 30 + [0.041, 0.039],
            [(37, "entropy")],
        ),  # a tenth of the first steps, not of the last ones
        ([1.77, None, math.nan, "0.0", 0.8], []),
    ],
)
def test_entropy_collapses(entropy: list[object], expected: list[tuple[int, str]]) -> None:
    assert begun(course("entropy", entropy)) == expected


def test_a_step_without_an_update_is_not_judged_by_what_it_did_not_measure() -> None:
    idle = sound(entropy=None, mismatch_kl=None)  # as a step says where only the critic learned
    assert begun([idle, idle, *course("entropy", [1.0, 1.0]), idle, sound(entropy=0.04)]) == [(6, "entropy")]
    bad = sound(mismatch_kl=0.02)
    assert begun([sound(), bad, bad, idle, bad]) == [(5, "mismatch_kl")], "a step that says nothing ends no row"


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        ([0.011, 0.011, 0.009, 0.011, 0.011, 0.011], [(6, "mismatch_kl")]),
        ([1e-13] * 5 + [9e-4, 1.1e-3], [(7, "mismatch_kl")]),
        (
            [2e-4, 2e-4, 5e-3, 2e-4, 2e-4, 1.9e-3, 2.1e-3],
            [(7, "mismatch_kl")],
        ),  # 10 × the median: one odd step does not move it
        ([2e-4] * 4 + [5e-3], []),  # too early to know what is usual
        ([2e-3] * 5 + [9e-3] * 9, []),
        ([2e-3] * 5 + [1.5e-2] * 2 + [9e-3], []),
        ([0.05] * 2, []),
        ([1e-5] * 5 + [9e-4] * 9, []),
    ],
)
def test_mismatch_grows(kl: list[object], expected: list[tuple[int, str]]) -> None:
    assert begun(course("mismatch_kl", kl)) == expected


def test_a_correction_that_drops_all_is_told_with_its_mismatch() -> None:
    """No update, so no entropy: the mismatch is known all the same, where log-probabilities are recomputed."""
    nothing_learned = sound(entropy=None, mismatch_kl=0.5, dropped=1.0)
    assert begun([nothing_learned] * 4) == [(1, "dropped"), (3, "mismatch_kl")]
    assert begun([sound(dropped=0.5)] * 4) == []
    assert begun([sound(rollouts=0, entropy=None, mismatch_kl=None)] * 4) == []


def test_every_rollout_is_paid_the_same() -> None:
    assert begun([sound(), sound(reward_std=1e-9), sound(reward_std=0.0), sound(reward_std=0.0)]) == [(3, "reward")]


def part(name: str, std: float, **changes: object) -> dict[str, object]:
    return sound(parts_std={"format": 0.1, "truth": 0.2} | {name: std}, **changes)


def test_a_part_of_the_reward_saturates() -> None:
    constant = part("format", 0.0)
    assert begun([part("format", 0.1), *[constant] * 4]) == [(4, "part:format")]
    assert begun([part("format", 0.1), constant, constant, part("format", 0.1), constant, constant]) == []
    assert begun([constant] * 9) == [], "it never varied"
    assert begun([sound(), *[sound(parts_std={"format": 0.0, "truth": 0.0})] * 5]) == [], "the others are constant too"
    assert begun([sound(), constant, constant, sound(parts_std={"truth": 0.2}), constant]) == [(5, "part:format")], (
        "absent, not varying"
    )
    both = sound(parts={"a": 1, "b": 1, "c": 1}, parts_std={"a": 0.0, "b": 0.0, "c": 0.1})
    assert begun([both | {"parts_std": {"a": 1.0, "b": 1.0, "c": 1.0}}, both, both, both]) == [
        (4, "part:a"),
        (4, "part:b"),
    ]


@pytest.mark.parametrize("key", ["truncated", "repetition"])
def test_shares(key: str) -> None:
    assert begun(course(key, [0.0, 0.499, 0.5, 0.9])) == [(3, key)]


def test_an_alarm_is_said_again_only_after_it_was_away() -> None:
    assert begun(course("truncated", [0.6, 0.4, 0.6, 0.4, 0.4, 0.4, 0.4, 0.6])) == [(1, "truncated")]
    assert begun(course("truncated", [0.6, *[0.4] * CALM, 0.6, 0.6])) == [(1, "truncated"), (CALM + 2, "truncated")]
    assert begun(course("truncated", [0.6, *[0.4] * (CALM - 1), None, 0.6])) == [(1, "truncated")], (
        "an unknown value is no calm"
    )


def test_limits_are_settings() -> None:
    assert begun(course("entropy", [1.0, 0.4]), Alarms(entropy_share=0.5, entropy_floor=0.5)) == [(2, "entropy")]
    assert begun(course("truncated", [0.2]), Alarms(truncated=0.2)) == [(1, "truncated")]


@pytest.mark.parametrize(
    ("steps", "texts"),
    [
        (course("entropy", [1.77, 0.02]), ["entropy 0.02 nats", "limit 0.05", "1.8", "clip_high"]),
        (course("mismatch_kl", [0.02] * 3), ["mismatch KL 2.0e-02 nats", "limit 1e-02 for 3 steps", "handover.verify"]),
        (course("mismatch_kl", [2e-4] * 5 + [4e-3]), ["mismatch KL 4.0e-03 nats", "limit 2.0e-03", "2.0e-04"]),
        (course("reward_std", [0.0]), ["reward 0.5 in every rollout", "limit", "scored"]),
        ([sound(), *[part("format", 0.0)] * 3], ["reward part format 0.9 in every rollout", "limit 3", "gamed"]),
        (course("truncated", [0.625]), ["62.5% of completions truncated", "limit 50%", "rollout.max_tokens"]),
        (course("repetition", [0.625]), ["repetition 62.5%", "limit 50%", "rollouts"]),
    ],
)
def test_a_line_says_value_limit_and_where_to_look(steps: list[dict[str, object]], texts: list[str]) -> None:
    alarms = Alarms()
    lines = [line for values in steps for line in alarms.check(values).values()]
    assert len(lines) == 1
    assert "\n" not in lines[0]
    for text in texts:
        assert text in lines[0]


def test_nothing_is_judged_by_metrics_that_are_not_there() -> None:
    assert begun([{}, {"entropy": None}, {"rollouts": 3}]) == []


STEP = st.fixed_dictionaries(
    {
        "entropy": st.sampled_from([1.0, 0.04, None, math.nan]),
        "mismatch_kl": st.sampled_from([1e-4, 5e-3, 0.02]),
        "reward": st.just(0.5),
        "reward_std": st.sampled_from([0.0, 0.3]),
        "parts": st.just({"a": 0.1, "b": 0.2}),
        "parts_std": st.fixed_dictionaries({"a": st.sampled_from([0.0, 0.0, 0.1]), "b": st.sampled_from([0.0, 0.1])}),
        "truncated": st.sampled_from([0.4, 0.4, 0.6]),
        "repetition": st.sampled_from([0.4, 0.6]),
        "rollouts": st.sampled_from([0, 8, 8, 8]),
    }
)


@given(st.lists(STEP, min_size=1, max_size=30), st.data())
def test_a_resumed_run_says_what_one_never_killed_says(steps: list[dict[str, object]], data: st.DataObject) -> None:
    """Killed after any step, and the steps past its checkpoint done again."""
    whole = Alarms()
    expected = [whole.check(values) for values in steps]
    saved, killed = data.draw(st.integers(0, len(steps))), Alarms()
    for values in steps[:saved]:
        killed.check(values)
    state = json.loads(json.dumps(killed.state()))
    kept = json.dumps(state)
    for values in steps[saved:]:
        killed.check(values)
    resumed = Alarms()
    resumed.restore(state)
    assert [resumed.check(values) for values in steps[saved:]] == expected[saved:]
    assert resumed.state() == whole.state()
    assert json.dumps(state) == kept, "what was restored from is not shared with what goes on"


def test_what_alarms_remember_does_not_grow_with_the_run() -> None:
    alarms = Alarms()
    begun([sound(entropy=1.0 + i, mismatch_kl=1e-4 * i) for i in range(20)], alarms)
    size = len(json.dumps(alarms.state()))
    begun([sound() for _ in range(200)], alarms)
    assert len(json.dumps(alarms.state())) == size
    assert [len(values) for values in alarms.state()["first"].values()] == [FIRST, FIRST]


def parting(reward: Iterable[float], gold: Iterable[float]) -> list[dict[str, object]]:
    return [{"reward": r, "measures": {"gold": g}} for r, g in zip(reward, gold, strict=True)]


NOISE = [0.003, -0.002, 0.001, -0.003, 0.002] * 8


def test_a_reward_that_is_gamed_is_told_by_what_is_not_paid() -> None:
    """The reward rises on, its gold falls: slowly, after they rose together."""
    together = parting([0.1 + 0.02 * i + NOISE[i] for i in range(20)], [0.05 + 0.02 * i + NOISE[i] for i in range(20)])
    apart = parting([0.5 + 0.01 * i + NOISE[i] for i in range(20)], [0.43 - 0.01 * i - NOISE[i] for i in range(20)])
    found = begun([*together, *apart])
    assert [name for _, name in found] == ["measure:gold"]
    assert 24 <= found[0][0] <= 30
    alarms = Alarms()
    for values in together:
        alarms.check(values)
    resumed = Alarms()
    resumed.restore(json.loads(json.dumps(alarms.state())))
    assert [(n + 20, name) for n, name in begun(apart, resumed)] == found
    (line,) = [line for values in apart for line in alarms.check(values).values()]
    assert line.startswith("measure gold fell to 0.")
    assert "the reward is gamed" in line


@pytest.mark.parametrize(
    ("reward", "gold"),
    [
        ([0.5] * 40, [0.5] * 40),
        ([0.5 + n for n in NOISE], [0.5 - n for n in NOISE]),  # noise alone, even if opposed
        (
            [0.5 - 0.01 * i for i in range(40)],
            [0.5 - 0.01 * i for i in range(40)],
        ),  # a run that gets worse is not gamed
        ([0.01 * i for i in range(40)], [0.0] * 40),
    ],
)
def test_what_is_no_gaming(reward: list[float], gold: list[float]) -> None:
    assert begun(parting(reward, gold)) == []
