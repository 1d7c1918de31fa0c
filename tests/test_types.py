import math
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.attention.attend import Packed
from hybrid_rl.types import FINISH_REASONS, Group, PackedBatch, Rollout, Task

ASK = ({"role": "user", "content": "hello"},)


def rollout(index: int = 0, reward: float | None = None, task: str = "t", group: int = 0) -> Rollout:
    r = Rollout(task, group, index, seed=7, token_ids=[1, 2, 3])
    if reward is not None:
        r.score(reward, {})
    return r


# ---- Task -------------------------------------------------------------------------------------------------------------


def test_task_needs_an_id() -> None:
    with pytest.raises(ValueError, match="id"):
        Task("", ASK, "answer")


@pytest.mark.parametrize(
    "messages", [(), ({"role": "user"},), ({"role": "user", "content": "x", "name": "y"},), (*ASK, {"content": "x"})]
)
def test_task_refuses_messages_that_are_not_role_and_content(messages: tuple) -> None:
    with pytest.raises(ValueError, match="task t: messages"):
        Task("t", messages, "answer")


def tokens_of(r: Rollout) -> tuple[list[int], list[bool], list[float]]:
    assert (r.token_ids.dtype, r.loss_mask.dtype, r.logprobs.dtype) == (np.int32, bool, np.float32)
    return r.token_ids.tolist(), r.loss_mask.tolist(), r.logprobs.tolist()


# ---- Rollout ----------------------------------------------------------------------------------------------------------


def test_rollout_starts_as_its_prompt() -> None:
    r = rollout()
    assert (*tokens_of(r), r.prompt_length, r.sampled, r.versions) == ([1, 2, 3], [False] * 3, [0.0] * 3, 3, 0, [])
    with pytest.raises(ValueError, match="prompt"):
        Rollout("t", 0, 0, 0, [])


segment = st.one_of(
    st.tuples(st.just("observed"), st.lists(st.integers(0, 99), max_size=5)),
    st.tuples(
        st.just("sampled"),
        st.lists(st.tuples(st.integers(0, 99), st.floats(-30, 0, width=32)), max_size=5).flatmap(
            lambda tokens: st.tuples(st.just(tokens), st.integers(0, len(tokens)), st.integers(0, 3))
        ),
    ),
)


@given(prompt=st.lists(st.integers(0, 99), min_size=1, max_size=5), segments=st.lists(segment, max_size=6))
def test_rollout_only_grows_and_keeps_its_lengths(prompt: list[int], segments: list) -> None:
    r = Rollout("t", 0, 0, 0, list(prompt))
    ids, mask, logprobs, versions = list(prompt), [False] * len(prompt), [0.0] * len(prompt), []
    for kind, content in segments:
        if kind == "observed":
            r.add_observed(content)
            ids, mask, logprobs = ids + content, mask + [False] * len(content), logprobs + [0.0] * len(content)
        else:
            tokens, old, version = content  # the first `old` tokens under `version`, the rest under the next one
            new = len(tokens) - old
            r.add_sampled([t for t, _ in tokens], [lp for _, lp in tokens], [(version, old), (version + 1, new)])
            ids, mask = ids + [t for t, _ in tokens], mask + [True] * len(tokens)
            logprobs, versions = logprobs + [lp for _, lp in tokens], versions + [version] * old + [version + 1] * new
        assert tokens_of(r) == (ids, mask, logprobs)
    assert r.prompt_length == len(prompt)
    assert r.sampled == sum(mask) == len(versions)
    assert [v for v, n in r.versions for _ in range(n)] == versions
    assert all(n > 0 for _, n in r.versions)


@pytest.mark.parametrize(
    ("ids", "logprobs", "versions"),
    [
        ([5, 6], [-1.0], [(0, 2)]),
        ([5, 6], [-1.0, -1.0], [(0, 1)]),
        ([5], [-1.0], []),
        ([], [], [(0, 1)]),
        ([5], [-1.0], [(0, 1), (1, 1)]),
    ],
)
def test_rollout_refuses_facts_that_disagree_and_stays_as_it_was(ids: list, logprobs: list, versions: list) -> None:
    r = rollout()
    with pytest.raises(ValueError, match="task t"):
        r.add_sampled(ids, logprobs, versions)
    assert r == rollout()


@pytest.mark.parametrize("bad", [math.nan, 0.5, math.inf, -math.inf, -1e39])  # the last is −∞ in float32
def test_rollout_refuses_a_logprob_that_is_none(bad: float) -> None:
    r = rollout()
    with pytest.raises(ValueError, match=rf"log-probability .* but {re.escape(str(bad))} \(token 4\)"):
        r.add_sampled([5, 6], [-1.0, bad], [(0, 2)])
    assert r == rollout()


def test_end_token_keeps_its_mask_where_padding_is_the_same_token() -> None:
    end = pad = 3  # also the prompt's last token: the mask follows what was sampled, not a token's value
    r = rollout()
    r.add_sampled([9, end], [-0.1, -0.2], [(0, 2)])
    r.add_observed([pad])
    assert tokens_of(r)[:2] == ([1, 2, 3, 9, 3, 3], [False, False, False, True, True, False])


def test_rollouts_are_equal_if_every_fact_is() -> None:
    assert rollout() != 1
    changes: list[tuple] = [("add_sampled", [4], [-0.5], [(0, 1)]), ("add_observed", [4]), ("score", 1.0, {})]
    for name, *facts in changes:
        one, other = rollout(), rollout()
        getattr(one, name)(*facts)
        assert one != other
        getattr(other, name)(*facts)
        assert one == other


def test_a_rollout_takes_9_bytes_for_a_token() -> None:
    r = rollout()
    r.add_sampled(range(10_000), [-1.0] * 10_000, [(0, 10_000)])
    assert len(pickle.dumps(r)) < 9 * 10_003 + 1000  # as ranks exchange it
    assert pickle.loads(pickle.dumps(r)) == r  # noqa: S301


def test_finish_and_score_record_and_refuse() -> None:
    r = rollout()
    with pytest.raises(ValueError, match="finish reason"):
        r.finish("eos", "text")  # type: ignore[arg-type]
    assert r.finish_reason is None
    assert r.completion == ""
    for reason in FINISH_REASONS:
        r.finish(reason, "text")
        assert (r.finish_reason, r.completion) == (reason, "text")
    parts = {"format": 0.2}
    r.score(1, parts)
    parts["format"] = 9.0
    assert r.reward == 1.0
    assert isinstance(r.reward, float)
    assert r.reward_parts == {"format": 0.2}


@pytest.mark.parametrize(
    ("reward", "parts"), [(math.nan, {}), (math.inf, {}), (1.0, {"a": 0.0, "b": math.nan}), (1.0, {"a": -math.inf})]
)
def test_reward_must_be_finite(reward: float, parts: dict) -> None:
    r = rollout()
    with pytest.raises(ValueError, match="not finite"):
        r.score(reward, parts)
    assert r.reward is None
    assert r.reward_parts == {}


# ---- Group ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rollouts",
    [
        [],
        [rollout(task="other")],
        [rollout(group=1)],
        [rollout(1), rollout(0)],
        [rollout(0), rollout(0)],
        [rollout(0), rollout(2)],
    ],
    ids=["empty", "task", "group", "order", "twice", "gap"],
)
def test_group_refuses_rollouts_that_are_not_its_own(rollouts: list[Rollout]) -> None:
    with pytest.raises(ValueError, match="group 0"):
        Group(0, Task("t", ASK, "a"), rollouts)


def test_group_is_ready_when_all_rewards_are_in() -> None:
    group = Group(0, Task("t", ASK, "a"), [rollout(0, 1.0), rollout(1)])
    assert not group.ready
    with pytest.raises(ValueError, match="not ready"):
        _ = group.rewards
    with pytest.raises(ValueError, match="not ready"):
        group.silent()
    group.rollouts[1].score(0.0, {})
    assert group.ready
    assert group.rewards == [1.0, 0.0]
    assert not group.silent()
    assert not group.failed
    group.rollouts[1].error = "the reward timed out"
    assert group.failed


@pytest.mark.parametrize(
    ("rewards", "silent"), [([0.5] * 8, True), ([0.0, 0.0], True), ([1.0], True), ([0.5] * 7 + [0.51], False)]
)
def test_group_with_equal_rewards_is_silent(rewards: list[float], silent: bool) -> None:
    assert Group(0, Task("t", ASK, "a"), [rollout(i, r) for i, r in enumerate(rewards)]).silent() is silent


# ---- PackedBatch ------------------------------------------------------------------------------------------------------


def batch(**changes: torch.Tensor) -> PackedBatch:
    n = torch.arange(3)
    facts = {"input_ids": n, "position_ids": n, "predict_at": n[:2], "targets": n[:2], "token_index": n[:2]}
    return PackedBatch(layout=Packed([3]), **(facts | changes))


def test_packed_batch_accepts_what_fits_and_moves() -> None:
    row = batch()
    moved = row.to("cpu")
    assert moved is not row
    assert torch.equal(moved.predict_at, row.predict_at)
    empty = torch.zeros(0, dtype=torch.int64)
    assert len(batch(predict_at=empty, targets=empty, token_index=empty).targets) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"position_ids": torch.arange(4)}, {"input_ids": torch.arange(3)[None], "position_ids": torch.arange(3)[None]},
        {"targets": torch.arange(3)}, {"token_index": torch.arange(1)}, {"predict_at": torch.tensor([0, 3])},
    ],
    ids=["positions", "two-dimensional", "targets", "token-index", "past-the-row"],
)  # fmt: skip
def test_packed_batch_refuses_what_does_not_fit(changes: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=r"must|outside the row"):
        batch(**changes)


def test_which_metric_decides_that_a_group_is_silent():
    """A price on length makes rewards differ where outcomes are equal; a filter on the outcome does not see it."""
    group = Group(0, Task("t", ASK, "a"), [rollout(i, None) for i in range(2)])
    for r, cost in zip(group.rollouts, (0.0, -0.3), strict=True):
        r.score(0.8, {"right": 0.5, "format": 0.3})
        r.shape("overlong", cost)
    assert [r.outcome for r in group.rollouts] == [0.8, 0.8]
    assert [r.reward for r in group.rollouts] == pytest.approx([0.8, 0.5])
    silent = {by: group.silent(by) for by in ("outcome", "reward", "none", "right", "overlong")}
    assert silent == {"outcome": True, "reward": False, "none": False, "right": True, "overlong": False}
    with pytest.raises(KeyError):
        group.silent("colour")
    with pytest.raises(ValueError, match="'overlong' cannot be added"):
        group.rollouts[0].shape("overlong", -1.0)
