"""A reward of named parts: weights, sources, measures that are not paid, batches, and TRL's functions as they are."""

import time

import pytest

from hybrid_rl.rollout.reward_call import BAD_BATCH, NO_PARTS, Reward, RewardFault, Score
from hybrid_rl.rollout.rewards import RewardError, Scorer
from hybrid_rl.types import Rollout, Task

OWN = "tests.composed_rewards"


def task(answer: str = "ab", source: str = "", **columns) -> Task:
    return Task("t", ({"role": "user", "content": "x"},), answer, source=source, columns=columns)


def part(name: str, **settings) -> dict:
    return {"_target_": f"{OWN}.{name}", **settings}


def test_weights_multiply_and_a_part_of_weight_0_is_logged_and_not_paid():
    reward = Reward(
        {"long": part("length", weight=0.5), "gold": part("length", weight=0), "debt": part("length", weight=-2)}
    )
    assert reward.score(["abc"], [task()]) == [Score(1.5 - 6.0, {"long": 1.5, "debt": -6.0}, {"gold": 3.0})]


def test_inner_parts_and_measures_carry_the_name_of_their_part():
    (score,) = Reward({"m": part("measured", weight=2.0), "n": part("measured", weight=0)}).score(["gold"], [task()])
    assert score == Score(6.0, {"m.a": 2.0, "m.b": 4.0}, {"m.gold": 1.0, "n.a": 1.0, "n.b": 2.0, "n.gold": 1.0}, "g")
    assert Reward(part("measured")).score([""], [task()]) == [Score(3.0, {"a": 1.0, "b": 2.0}, {"gold": 0.0}, None)]


def test_a_part_pays_for_its_sources_alone():
    reward = Reward({"x": part("length", sources=["maths"]), "y": part("length", weight=10, sources=["code"])})
    maths, code, other = reward.score(
        ["a", "a", "a"], [task(source="maths"), task(source="code"), task(source="other")]
    )
    assert (maths.parts, code.parts) == ({"x": 1.0}, {"y": 10.0})
    assert other == RewardFault(NO_PARTS, "no part of the reward pays for tasks of source 'other'")


def test_a_part_that_fails_fails_the_reward_and_is_named():
    assert Reward({"a": part("length"), "b": part("fails", weight=0)}).score(["x"], [task()]) == [
        RewardFault("ValueError", "part 'b': ValueError: no")
    ]
    assert Reward({"a": part("length"), "b": part("nothing")}).score(["x"], [task()]) == [Score(1.0, {"a": 1.0})]


def test_trl_functions_run_as_they_are():
    text = Reward({"_target_": "hybrid_rl.rewards.Trl", "function": f"{OWN}.trl_text", "messages": False})
    assert [s.reward for s in text.score(["ab", "b"], [task(hint=1), task()])] == [11.0, 0.0]
    named = Reward(
        {
            "t": {"_target_": "hybrid_rl.rewards.Trl", "function": f"{OWN}.trl_text", "messages": False},
            "l": part("length"),
        }
    )
    assert named.score(["skip"], [task()])[0].parts == {"l": 4.0}
    chat = Reward({"_target_": "hybrid_rl.rewards.Trl", "function": f"{OWN}.trl_chat"})
    assert chat.score(["abc"], [task(hint=1)])[0].reward == 3.0
    few = Reward({"_target_": "hybrid_rl.rewards.Trl", "function": f"{OWN}.trl_few", "messages": False})
    assert few.score(["ab"], [task(hint=1)])[0].reward == 1.0
    with pytest.raises(
        TypeError, match=r"write \{_target_: hybrid_rl.rewards.Trl, function: tests.composed_rewards.trl_text\}"
    ):
        Reward(part("trl_text"))


def test_a_class_is_made_once():
    reward = Reward(part("Counting", start=5))
    assert [reward.score(["x"], [task()])[0].reward for _ in range(3)] == [6.0, 7.0, 8.0]
    assert not reward.many


def test_only_the_completion_at_fault_has_no_reward_in_a_batch():
    reward = Reward(part("batched"))
    assert reward.many
    good, bad = reward.score(["ab", "raise"], [task(), task()])
    assert (good.reward, bad) == (2.0, RewardFault("ValueError", "ValueError: one is bad"))
    _, bad = reward.score(["ab", "short"], [task(), task()])
    assert bad == RewardFault(
        BAD_BATCH, "the reward returned list, not a list for 1 completions; return one number each"
    )


def scored(section: dict, completions: list[str], timeout: float = 2.0, **settings) -> list[Rollout]:
    scorer = Scorer(section, 1, timeout, batch=8, **settings)
    try:
        scorer.check()
        rollouts = []
        for index, completion in enumerate(completions):
            r = Rollout("t", 0, index, 0, [1])
            r.finish("stop", completion)
            scorer.submit(r, task())
            rollouts.append(r)
        scorer.finish()
        return rollouts
    finally:
        scorer.close()


def test_a_batch_that_hangs_or_dies_costs_one_reward_each():
    rollouts = scored(part("batched"), ["a", "hang", "bb", "die", "ccc"], timeout=1.0)
    assert [r.reward for r in rollouts] == [1.0, None, 2.0, None, 3.0]
    assert [r.fault for r in rollouts] == [None, "timeout", None, "died", None]


def test_async_rewards_wait_together():
    start = time.monotonic()
    rollouts = scored(part("together", seconds=0.5), ["a" * n for n in range(16)], timeout=5.0)
    assert [r.reward for r in rollouts] == list(range(16))
    assert time.monotonic() - start < 16 * 0.5


def test_a_source_that_no_part_pays_for_is_found_before_the_run():
    scorer = Scorer({"x": part("length", sources=["maths"])}, 1, 5.0)
    try:
        with pytest.raises(
            RewardError, match=r"^reward, tried .* no part of the reward pays for tasks of source 'code'"
        ):
            scorer.check([task(source="maths"), task(source="code")])
    finally:
        scorer.close()
