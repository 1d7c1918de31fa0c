"""Drawing tasks, and rendering them to ids exactly once."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.config import Config, PolicyConfig, RlConfig, RolloutConfig, SftConfig
from hybrid_rl.data import DataError, TaskSets, load_task_sets
from hybrid_rl.data.prepare import prepare
from hybrid_rl.data.render import completion_text, demonstration, prompt_ids
from hybrid_rl.data.sampler import Sampler
from hybrid_rl.policy.tiny import character_tokenizer
from hybrid_rl.rollout.rewards import Scorer
from hybrid_rl.types import Rollout, Task


def task(id: str, demonstration: str | None = "d", text: str = "hello") -> Task:
    return Task(id, ({"role": "user", "content": text},), "a", demonstration)


def three_sets(rl: int = 8, sft: int = 8, held_out: int = 2) -> TaskSets:
    return TaskSets(
        [task(f"s{i}") for i in range(sft)],
        [task(f"r{i}") for i in range(rl)],
        [task(f"e{i}") for i in range(held_out)],
    )


@given(size=st.integers(1, 40), seed=st.integers(0, 5), counts=st.lists(st.integers(1, 30), max_size=12))
def test_every_epoch_draws_every_task_once(size, seed, counts):
    sampler = Sampler(size, seed)
    drawn = [i for count in counts for i in sampler.draw(count)]
    for start in range(0, len(drawn) - size + 1, size):
        assert sorted(drawn[start : start + size]) == list(range(size))


@given(size=st.integers(1, 40), before=st.integers(0, 100), after=st.integers(1, 100))
def test_a_restored_sampler_goes_on_where_it_stood(size, before, after):
    one, two = Sampler(size, 3), Sampler(size, 3)
    one.draw(before)
    two.restore(one.state())
    assert one.draw(after) == two.draw(after)


def test_epochs_and_seeds_have_orders_of_their_own():
    sampler = Sampler(50, 0)
    assert sampler.draw(50) != sampler.draw(50)
    assert Sampler(50, 0).draw(50) != Sampler(50, 1).draw(50)


def test_a_sampler_refuses_another_data_set():
    with pytest.raises(ValueError, match="50 tasks with seed 0, this run has 49"):
        Sampler(49, 0).restore(Sampler(50, 0).state())


def test_overlapping_or_doubled_tasks_are_named():
    with pytest.raises(DataError, match="'x' is in both sft and eval"):
        TaskSets([task("x")], [], [task("x")])
    with pytest.raises(DataError, match="'x' is twice in rl"):
        TaskSets([], [task("x"), task("x")], [])


def test_a_set_smaller_than_a_batch_says_so():
    config = {"_target_": "tests.data.test_tasks.three_sets", "rl": 5}
    with pytest.raises(DataError, match="the rl set has 5 tasks, fewer than the 8"):
        load_task_sets(config, rl_tasks=8, sft_tasks=4)
    assert len(load_task_sets(config, rl_tasks=5, sft_tasks=4).rl) == 5
    with pytest.raises(DataError, match="eval set has 0"):
        load_task_sets({"_target_": "tests.data.test_tasks.three_sets", "held_out": 0}, rl_tasks=0, sft_tasks=0)


def test_tasks_that_are_too_long_are_dropped_and_counted_by_source(policy):
    def of(name: str, *sizes: int, source: str = "") -> list[Task]:
        return [replace(task(f"{name}{source}{n}", "d" * n, "x" * n), source=source) for n in sizes]

    base = len(prompt_ids(task("t", text="x"), policy.tokenizer, 100)) - 1
    sets = TaskSets(
        of("s", 1, 9), [*of("r", 1, 5, 6, source="a"), *of("r", 5, source="b"), *of("r", 7, source="b")], of("e", 2)
    )
    settings = {
        "rollout": RolloutConfig(batch_size=6, group_size=2, max_prompt_tokens=base + 5),
        "sft": SftConfig(steps=0),
    }
    config = Config(data={"drop_long": True}, policy=PolicyConfig(row_tokens=100), **settings)
    checked = prepare(config, sets, policy.tokenizer, 300)
    kept = sets.without(checked.dropped)
    assert [t.id for t in kept.rl] == ["ra1", "ra5", "rb5"]
    assert checked.lengths == {"rl": [base + 1, base + 5, base + 5], "eval": [base + 2], "sft": []}
    why = f"prompt over rollout.max_prompt_tokens={base + 5} tokens"
    assert kept.notes == (f"dropped 1 of 3 rl tasks of a: {why}", f"dropped 1 of 2 rl tasks of b: {why}")
    assert kept.dropped == {"rl": 2}
    with pytest.raises(
        DataError, match=rf"the rl set has 3 tasks, fewer than the 4 .*; dropped 1 of 3 rl tasks of a: {why}"
    ):
        prepare(replace(config, rollout=replace(config.rollout, batch_size=8)), sets, policy.tokenizer, 300)
    with pytest.raises(
        DataError, match=r"^task ra6: its prompt has \d+ tokens, .*; raise it or drop the task .data.drop_long=true"
    ):
        prepare(replace(config, data={}), sets, policy.tokenizer, 300)
    short = replace(config, policy=PolicyConfig(row_tokens=base + 4), sft=SftConfig(steps=1, batch_size=1))
    assert prepare(short, sets, policy.tokenizer, 300).dropped["s9"] == why
    long = replace(short, rollout=replace(config.rollout, max_prompt_tokens=99))
    assert prepare(long, sets, policy.tokenizer, 300).dropped == {
        "s9": f"prompt and demonstration over policy.row_tokens={base + 4} tokens"
    }


def test_a_part_of_the_reward_for_a_source_that_no_task_has_is_told(policy):
    sets = TaskSets([], [replace(task("r", "d", "x"), source="maths")], [task("e", "d", "y")])
    parts = {"a": {"_target_": "m.f", "sources": ["maths"]}, "b": {"_target_": "m.f", "sources": ["code", "math"]}}
    config = Config(reward=parts, rl=RlConfig(steps=0), sft=SftConfig(steps=0), policy=PolicyConfig(row_tokens=100))
    assert prepare(config, sets, policy.tokenizer, 300).notes == [
        f'no task is of the source {name!r}, which reward.b.sources names; there are: "", maths'
        for name in ("code", "math")
    ]


def test_digests_name_everything_that_tasks_say_in_their_order():
    def digests(*tasks: Task) -> dict[str, str]:
        return TaskSets([], list(tasks), [task("e")]).digests()

    one, columns = task("a"), {"level": 3, "tags": ["x"]}
    base = digests(one, task("b"))
    assert base == digests(task("a"), Task("b", ({"content": "hello", "role": "user"},), "a", "d"))
    assert base.keys() == {"rl", "sft", "eval"}
    # of json.dumps(…) + "\n" for each task, by sha256sum
    assert base["sft"] == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    others = [
        (task("b"), one), (one,), (one, task("c")), (one, task("b", "other")), (one, task("b", text="other")), (one, replace(task("b"), answer="b")),
        (one, replace(task("b"), source="s")), (one, replace(task("b"), columns=columns)), (one, replace(task("b"), columns={"level": 4})),
    ]  # fmt: skip
    found = {digests(*other)["rl"] for other in others}
    assert len(found) == len(others)
    assert base["rl"] not in found
    assert all(digests(*other)["eval"] == base["eval"] for other in others)


def test_columns_that_json_cannot_hold_are_refused():
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    for columns, reason in (
        ({"x": b"a"}, "bytes is not JSON"),
        ({"x": {1, 2}}, "set is not JSON"),
        ({"x": deep}, "recursion"),
    ):
        with pytest.raises(
            DataError, match=f"task 'a' of the rl set: its columns are not values that JSON can hold .*{reason}"
        ):
            TaskSets([], [replace(task("a"), columns=columns)], [])


def test_a_reward_in_its_process_sees_the_columns():
    scorer = Scorer({"_target_": "tests.rewards.level"}, 1, 30.0)
    try:
        rollout = Rollout("t", 0, 0, 0, [1])
        rollout.add_sampled([2], [-0.5], [(0, 1)])
        rollout.finish("stop", "ab")
        scorer.submit(rollout, replace(task("t"), columns={"info": {"level": 3.5, "tags": ["x", None]}}))
        assert scorer.finish() == 0
    finally:
        scorer.close()
    assert rollout.reward == 5.5


def test_prompt_ids_come_from_the_template_alone(policy):
    ids = prompt_ids(task("t"), policy.tokenizer, 100)
    assert policy.tokenizer.decode(ids) == "<|im_start|>user\nhello<|im_end|><|im_start|>assistant\n"
    with pytest.raises(DataError, match=r"task t: its prompt has \d+ tokens, rollout.max_prompt_tokens=3"):
        prompt_ids(task("t"), policy.tokenizer, 3)


TOKENIZER = character_tokenizer(["<reversed_text>", "</reversed_text>"])


@given(text=st.text(max_size=40).filter(lambda t: "<|" not in t))
def test_any_text_survives_the_character_tokenizer(text):
    assert completion_text(TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER) == text


def test_a_demonstration_ends_with_the_end_token_and_masks_its_prompt(policy):
    rollout = demonstration(task("t", "<reversed_text>olleh</reversed_text>"), policy.tokenizer, 100)
    assert rollout.token_ids[-1] == policy.tokenizer.eos_token_id
    assert rollout.loss_mask.tolist() == [False] * rollout.prompt_length + [True] * rollout.sampled
    assert rollout.sampled == 1 + 5 + 1 + 1  # a tag is one token
    assert (
        completion_text(rollout.token_ids[rollout.prompt_length :].tolist(), policy.tokenizer, stopped=True)
        == "<reversed_text>olleh</reversed_text>"
    )
