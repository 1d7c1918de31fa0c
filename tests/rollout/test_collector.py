"""Groups with the real engine and real reward processes: order, identity, replacement, and repeatability."""

import json
from collections.abc import Iterator

import pytest
import torch

from hybrid_rl.config import Config, PolicyConfig, RolloutConfig
from hybrid_rl.engine.base import Completion, EngineError
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.handover import hand_over
from hybrid_rl.policy.model import Policy
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.rollout.collector import Collector
from hybrid_rl.rollout.generate import Generator, request_seed
from hybrid_rl.rollout.rewards import RewardError, Scorer
from hybrid_rl.types import Task
from tests.ranks import on_ranks

TASKS = [Task(f"t{i}", ({"role": "user", "content": "x" * (i + 1)},), str(i)) for i in range(30)]
CONFIG = RolloutConfig(batch_size=12, group_size=3, max_tokens=6, max_prompt_tokens=40, max_replacements=2)


class Slowest(LocalEngine):
    """Hands completions out in the reverse of the order they finished in."""

    def generate(self, requests, sampling) -> Iterator[Completion]:
        return iter(list(super().generate(requests, sampling))[::-1])


def collect(
    policy,
    reward: str | dict,
    seed: int = 0,
    steps: int = 1,
    engine_type=LocalEngine,
    slots: int = 64,
    config: RolloutConfig = CONFIG,
):
    engine = engine_type(policy.model, policy.end_ids(), slots, 64)
    engine.set_version(4)
    scorer = Scorer(
        {"_target_": f"tests.rewards.{reward}"} if isinstance(reward, str) else reward, workers=1, timeout=5
    )
    try:
        collector = Collector(
            Generator(engine, policy.tokenizer, scorer), TASKS, Config(rollout=config, seed=seed), seed
        )
        return [collector.collect() for _ in range(steps)], collector
    finally:
        scorer.close()


def fingerprint(batch):
    return [
        (r.task_id, r.group_id, r.index, r.token_ids.tolist(), r.logprobs.tolist(), r.reward) for r in batch.rollouts
    ]


def test_a_step_has_its_full_number_of_scored_rollouts_in_task_order(policy):
    (batch,), _ = collect(policy, "hash_of_answer")
    assert len(batch.rollouts) == 12
    assert [(r.group_id, r.index) for r in batch.rollouts] == [(g.id, i) for g in batch.groups for i in range(3)]
    for group in batch.groups:
        prompt = policy.tokenizer.apply_chat_template(
            list(group.task.messages), add_generation_prompt=True, return_dict=False
        )
        for r in group.rollouts:
            assert r.token_ids[: r.prompt_length].tolist() == prompt
            assert r.versions == [(4, r.sampled)]
            assert sum(r.loss_mask) == r.sampled == len(r.token_ids) - r.prompt_length


def test_each_rollout_is_scored_with_its_own_completion_whatever_the_order_of_completion(policy):
    (forward,), _ = collect(policy, "hash_of_answer")
    (backward,), _ = collect(policy, "hash_of_answer", engine_type=Slowest)
    assert fingerprint(forward) == fingerprint(backward)
    from tests.rewards import hash_of_answer

    for group in forward.groups:
        assert [hash_of_answer(r.completion, group.task) for r in group.rollouts] == [r.reward for r in group.rollouts]


def test_the_same_seed_repeats_a_run_and_another_does_not(policy):
    one, _ = collect(policy, "hash_of_answer", steps=2)
    two, _ = collect(policy, "hash_of_answer", steps=2)
    other, _ = collect(policy, "hash_of_answer", steps=2, seed=1)
    assert [fingerprint(b) for b in one] == [fingerprint(b) for b in two]
    assert fingerprint(one[0]) != fingerprint(other[0])


def test_few_slots_give_the_same_samples_as_many(policy):
    (many,), _ = collect(policy, "hash_of_answer", slots=64)
    (few,), _ = collect(policy, "hash_of_answer", slots=2)
    assert [r.token_ids.tolist() for r in many.rollouts] == [r.token_ids.tolist() for r in few.rollouts]


def test_silent_groups_are_replaced_up_to_a_bound_and_the_shortfall_is_reported(policy):
    (batch,), collector = collect(policy, "constant")
    assert batch.groups == []
    assert batch.silent_groups == 4 * (1 + CONFIG.max_replacements)
    assert batch.missing_groups == 4
    assert batch.replacement_rounds == CONFIG.max_replacements
    assert collector.next_group == 12


def test_replacements_are_new_tasks_and_fill_the_step(policy):
    (batch,), _ = collect(
        policy,
        "silent_for_short",
        config=RolloutConfig(batch_size=12, group_size=3, max_tokens=6, max_prompt_tokens=40, max_replacements=20),
    )
    assert len(batch.groups) == 4
    assert batch.silent_groups == len(batch.dropped) > 0
    assert batch.missing_groups == 0
    assert len({g.task.id for g in batch.all_groups}) == len(batch.all_groups)
    assert all(not g.silent() for g in batch.groups)
    assert [g.id for g in batch.groups] == sorted(g.id for g in batch.groups)


def test_a_group_with_a_failed_reward_is_dropped_and_counted(policy):
    (batch,), _ = collect(
        policy,
        "raises_for_odd",
        config=RolloutConfig(
            batch_size=12,
            group_size=3,
            max_tokens=6,
            max_prompt_tokens=40,
            max_replacements=20,
            max_reward_failures=0.9,
        ),
    )
    assert batch.reward_errors > 0
    assert batch.reward_faults == {("unnamed", "ValueError"): batch.reward_errors}
    assert batch.examples["ValueError"].endswith(": ValueError: odd")
    assert len(batch.groups) == 4
    assert all(not g.failed for g in batch.groups)


def test_when_every_reward_fails_the_run_ends_with_the_reason(policy):
    with pytest.raises(
        RewardError, match=r"all \d+ rewards of a step failed; the last: RuntimeError: the checker is down"
    ):
        collect(policy, "always_raises")


def test_too_many_failures_end_the_run_with_one_line(policy):
    """A third of 30 tasks fail: just below and just above what is allowed. Replacements are asked for too, and count."""
    few = RolloutConfig(
        batch_size=90, group_size=3, max_tokens=6, max_prompt_tokens=40, max_replacements=0, max_reward_failures=1 / 3
    )
    (batch,), _ = collect(policy, {"_target_": "tests.rewards.fails_every", "n": 3}, config=few)
    assert batch.reward_faults == {("unnamed", "TimeoutError"): 30}
    few.max_reward_failures = 0.33
    said = r"30 of 90 rewards of a step failed \(TimeoutError 30\), more than rollout\.max_reward_failures=0\.33 of them; the first: task t\d+: Timeout"
    with pytest.raises(RewardError, match=said):
        collect(policy, {"_target_": "tests.rewards.fails_every", "n": 3}, config=few)


def test_what_the_engine_samples_from_broken_weights_ends_the_run_by_name(policy):
    with torch.no_grad():
        policy.model.model.norm.weight[0] = float("nan")
    with pytest.raises(
        EngineError,
        match=r"completion of group \d+, rollout \d+: task t\d+: a log-probability is not .* but nan \(token \d+\)",
    ):
        collect(policy, "hash_of_answer")


def test_a_restored_collector_goes_on_with_the_same_groups(policy):
    whole, _ = collect(policy, "hash_of_answer", steps=3)
    _, first = collect(policy, "hash_of_answer", steps=2)
    engine = LocalEngine(policy.model, policy.end_ids(), 64, 64)
    engine.set_version(4)
    scorer = Scorer({"_target_": "tests.rewards.hash_of_answer"}, workers=1, timeout=5)
    try:
        second = Collector(Generator(engine, policy.tokenizer, scorer), TASKS, Config(rollout=CONFIG), 0)
        second.restore(first.state())
        assert fingerprint(second.collect()) == fingerprint(whole[2])
    finally:
        scorer.close()


def test_a_mixture_goes_on_with_its_shares_after_a_resume(policy):
    """Replacements count as draws: two of three draws are of b, whatever is silent, and a restored collector draws the same."""
    tasks = [
        Task(f"{s}{i}", ({"role": "user", "content": s * (i + 1)},), str(i), source=s) for s in "ab" for i in range(6)
    ]
    curriculum = {"_target_": "hybrid_rl.data.curriculum.pass_rate", "pass_reward": 0.6}
    config = Config(rollout=CONFIG, data={"weights": {"a": 1, "b": 2}, "curriculum": curriculum})
    engine = LocalEngine(policy.model, policy.end_ids(), 64, 64)
    engine.set_version(4)
    scorer = Scorer({"_target_": "tests.rewards.silent_for_short"}, workers=1, timeout=5)
    try:
        generator = Generator(engine, policy.tokenizer, scorer)
        first, second = (Collector(generator, tasks, config, 7) for _ in range(2))
        batches = [first.collect(step) for step in (1, 2)]
        drawn = [group.task.source for batch in batches for group in batch.all_groups]
        assert sum(batch.silent_groups for batch in batches) > 0
        assert abs(drawn.count("b") - 2 / 3 * len(drawn)) < 1
        second.restore(json.loads(json.dumps(first.state())))
        assert batches[-1].curriculum["not_drawn"] == 12 - len(
            {group.task.id for batch in batches for group in batch.all_groups}
        )
        assert fingerprint(second.collect(3)) == fingerprint(first.collect(3))
    finally:
        scorer.close()


def test_request_seeds_differ_by_every_fact():
    seeds = {
        request_seed(run, kind, group, index)
        for run in range(5)
        for kind in ("rl", "eval")
        for group in range(20)
        for index in range(16)
    }
    assert len(seeds) == 5 * 2 * 20 * 16


def collect_on(ranks: Ranks, folder, reward: str) -> list[list[tuple]]:
    """Three steps' rollouts, and which of them this rank sampled."""
    policy = Policy.load(folder, torch.device("cpu"), PolicyConfig(), ranks)
    engine = LocalEngine(policy.sampler, policy.end_ids(), 64, 64)
    hand_over(policy, engine, 4)
    scorer = Scorer({"_target_": f"tests.rewards.{reward}"}, workers=1, timeout=5)
    try:
        collector = Collector(Generator(engine, policy.tokenizer, scorer, ranks), TASKS, Config(rollout=CONFIG), 0)
        batches = [collector.collect() for _ in range(3)]
        return [fingerprint(batch) for batch in batches], engine.stats.sampled_tokens
    finally:
        scorer.close()


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_the_same_seed_gives_the_same_rollouts_on_any_number_of_ranks(tiny_folder, world):
    """Prompt, completion and reward stay together over ranks, replacements included; every rank samples its share and knows them all."""
    expected, sampled = collect_on(Ranks(), tiny_folder, "hash_of_answer")
    results = on_ranks(world, collect_on, tiny_folder, "hash_of_answer")
    for steps, _ in results:
        for ours, theirs in zip(steps, expected, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert a[:4] == b[:4]
                assert a[4] == pytest.approx(b[4], abs=1e-5)  # log-probabilities: the engine's batch has other rows
                assert a[5] == b[5]
    assert sum(count for _, count in results) == sampled
    assert max(count for _, count in results) < 1.4 * sampled / world
