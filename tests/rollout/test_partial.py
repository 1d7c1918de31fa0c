"""Groups that take several steps: what is continued is what would have been sampled at once, each token under its own weights."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybrid_rl.config import Config, PolicyConfig, RolloutConfig
from hybrid_rl.engine.base import EngineDied, Request, Sampling
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.handover import hand_over
from hybrid_rl.policy.model import Policy
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.rollout.collector import Batch, Collector, extra_groups
from hybrid_rl.rollout.generate import Generator
from hybrid_rl.rollout.partial import lags, means_by_lag, shares_by_lag
from hybrid_rl.rollout.rewards import Scorer
from hybrid_rl.types import Rollout, Task
from tests.ranks import on_ranks

TASKS = [Task(f"t{i}", ({"role": "user", "content": "x" * (i % 7 + 1)},), str(i)) for i in range(40)]
ROLLOUT = {"batch_size": 12, "group_size": 3, "max_tokens": 20, "max_prompt_tokens": 40, "max_replacements": 2}
SAMPLING = Sampling(max_tokens=20)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    made = Scorer({"_target_": "tests.rewards.hash_of_answer"}, workers=1, timeout=5)
    yield made
    made.close()


@pytest.fixture
def staggered(folder_of) -> Policy:
    """Completions of 1 to 20 tokens."""
    return Policy.load(folder_of("staggered"), CPU)


def engine_of(policy: Policy, version: int = 0, slots: int = 64, kind: type[LocalEngine] = LocalEngine) -> LocalEngine:
    engine = kind(policy.sampler, policy.end_ids(), slots, 64)
    engine.set_version(version)
    return engine


def collector_of(policy: Policy, scorer: Scorer, engine: LocalEngine, revive=None, **settings) -> Collector:
    config = Config(rollout=RolloutConfig(**{**ROLLOUT, "oversample": 1.5, **settings}))
    return Collector(Generator(engine, policy.tokenizer, scorer, revive=revive), TASKS, config, 0)


def at_once(policy: Policy, rollouts: list[Rollout], engine: Any = None) -> list[tuple[list[int], list[float]]]:
    """What an engine that nothing interrupts samples for these prompts and seeds."""
    asked = [Request(i, r.token_ids[: r.prompt_length].tolist(), r.seed) for i, r in enumerate(rollouts)]
    done = {c.id: c for c in (engine or engine_of(policy)).generate(asked, SAMPLING)}
    return [(done[i].token_ids, done[i].logprobs) for i in range(len(rollouts))]


def sampled(rollout: Rollout) -> tuple[list[int], list[float]]:
    return rollout.token_ids[rollout.loss_mask].tolist(), rollout.logprobs[rollout.loss_mask].tolist()


def fingerprint(batch: Batch) -> list[tuple]:
    return [(r.task_id, r.group_id, r.index, *sampled(r), r.versions, r.reward) for r in batch.rollouts]


@pytest.mark.parametrize("slots", [64, 5])
def test_continued_groups_have_the_tokens_of_groups_sampled_at_once(staggered, scorer, slots):
    engine = engine_of(staggered, slots=slots)
    collector, counted, ended = collector_of(staggered, scorer, engine), 0, 0
    for step in range(1, 7):
        before, batch = engine.stats.sampled_tokens, collector.collect(step)
        assert len(batch.rollouts) == 12
        assert len(collector.underway.groups) == batch.partial.left == 2
        assert [g.id for g in batch.groups] == sorted(g.id for g in batch.groups)
        assert batch.partial.tokens == engine.stats.sampled_tokens - before
        everything = [r for group in batch.all_groups for r in group.rollouts]
        for r, (ids, logprobs) in zip(everything, at_once(staggered, everything), strict=True):
            assert sampled(r)[0] == ids
            assert sampled(r)[1] == pytest.approx(logprobs, abs=1e-5)
            assert r.versions == [(0, len(ids))]
            assert r.finish_reason == ("length" if len(ids) == 20 else "stop")
        counted, ended = counted + batch.partial.tokens, ended + sum(r.sampled for r in everything)
    open_tokens = sum(begun.tokens for begun in collector.underway.groups)
    assert counted == ended + open_tokens
    assert open_tokens > 0
    assert collector.next_group == 6 * 4 + 2


def test_every_token_has_the_version_and_the_log_probability_of_the_weights_that_sampled_it(
    staggered, scorer, folder_of, reference_of
):
    """Each step has other weights; plain transformers computes each token under those of its version."""
    folders = [folder_of("staggered", seed=seed) for seed in range(5)]
    engine = engine_of(staggered)
    collector, mixed = collector_of(staggered, scorer, engine), 0
    for version, folder in enumerate(folders):
        weights = load_file(folder / "model.safetensors")
        engine.update_weights([weights], version)
        batch = collector.collect(version + 1)
        for r in batch.rollouts:
            ids, logprobs = sampled(r)
            of = [v for v, count in r.versions for _ in range(count)]
            assert of == sorted(of)
            assert lags(r, version).tolist() == [version - v for v in of]
            prompt = r.token_ids[: r.prompt_length].tolist()
            exact = {v: reference_of(folders[v]).logprobs(prompt, ids, 1.0).tolist() for v in set(of)}
            assert logprobs == pytest.approx([exact[v][i] for i, v in enumerate(of)], abs=1e-4)
            mixed += len(set(of)) > 1
    assert mixed >= 3


def test_the_groups_of_a_step_are_those_that_end_first(staggered, scorer):
    """By brute force: all groups are sampled at once, and those whose longest rollout is shortest make the first step."""
    collector = collector_of(staggered, scorer, engine_of(staggered), max_replacements=0, max_tokens=20)
    batch = collector.collect(1)
    groups = [*batch.all_groups, *(begun.group for begun in collector.underway.groups)]
    longest = {g.id: max(len(ids) for ids, _ in at_once(staggered, g.rollouts)) for g in groups}
    assert len(longest) == 6
    last = max(longest[g.id] for g in batch.all_groups)
    for begun in collector.underway.groups:
        assert longest[begun.group.id] >= last
        assert max(len(c.token_ids) for c in begun.completions.values()) <= last


def test_a_group_that_is_too_old_is_discarded_and_counted(staggered, scorer):
    engine = engine_of(staggered)
    collector = collector_of(staggered, scorer, engine, max_staleness=2)
    collector.collect(1)
    old = {begun.group.id for begun in collector.underway.groups}
    engine.set_version(2)
    assert collector.underway.begin_step(2).discarded == 0
    engine.set_version(3)
    batch = collector.collect(2)
    assert (batch.partial.discarded, batch.partial.continued) == (6, 0)
    assert not old & {group.id for group in batch.all_groups}
    assert len(collector.underway.groups) == 2
    assert {v for r in batch.rollouts for v, _ in r.versions} == {3}


def test_a_restored_collector_goes_on_with_the_groups_under_way(staggered, scorer):
    first, second = (collector_of(staggered, scorer, engine_of(staggered)) for _ in range(2))
    for step in (1, 2):
        first.collect(step)
    state = json.loads(json.dumps(first.state()))
    second.restore(state)
    assert second.state() == first.state()
    expected = [fingerprint(first.collect(step)) for step in (3, 4)]
    assert [fingerprint(second.collect(step)) for step in (3, 4)] == expected
    without = collector_of(staggered, scorer, engine_of(staggered), oversample=1.0)
    without.restore(state)  # what is under way is part of the next step, and then the old order goes on
    batch = without.collect(3)
    assert {saved["id"] for saved in state["underway"]} <= {group.id for group in batch.all_groups}
    assert "underway" not in without.state()
    assert without.collect(4).partial is None


class Paymaster:
    """Stands in for a reward model."""

    def __init__(self) -> None:
        self.paid: list[tuple[int, int]] = []

    def pay(self, order) -> None:
        self.paid += [(group.id, rollout.index) for group, rollout in order]
        assert all(rollout.finish_reason != "abort" and rollout.reward is not None for _, rollout in order)


def test_all_that_a_reward_needs_happens_once_for_each_rollout_that_ended(staggered, scorer):
    """Penalties, a reward model, the greedy completion of a task, and what a curriculum learns of it."""
    engine, paymaster = engine_of(staggered), Paymaster()
    rollout = RolloutConfig(**ROLLOUT, oversample=1.5)
    curriculum = {"_target_": "hybrid_rl.data.curriculum.pass_rate", "pass_reward": 0.5}
    config = Config(rollout=rollout, data={"curriculum": curriculum})
    config.algo.advantage = {"_target_": "hybrid_rl.algo.remax.advantages"}
    config.algo.overlong_share = 0.5
    generator = Generator(engine, staggered.tokenizer, scorer, reward_model=paymaster)  # type: ignore[arg-type]
    collector, closed = Collector(generator, TASKS, config, 0), []
    for step in range(1, 6):
        engine.set_version(step)
        batch = collector.collect(step)
        closed += batch.all_groups
        assert batch.greedy.keys() == {group.id for group in batch.all_groups}
        for r in (r for group in batch.all_groups for r in group.rollouts):
            assert r.reward_parts["overlong"] == pytest.approx(-max(0, r.sampled - 10) / 10)
            assert r.reward == pytest.approx(r.outcome + r.reward_parts["overlong"])
    trained = [(group.id, index) for group in closed for index in range(3)]
    assert sorted(paymaster.paid) == sorted([*trained, *((group.id, 0) for group in closed)])  # and each greedy one
    assert batch.curriculum["not_drawn"] == 40 - len({group.task.id for group in closed})


class Dies(LocalEngine):
    """Dies for good in the fourth decoding step, as often as it is told to."""

    deaths, count = 0, 0

    def _advance(self, sampling):
        self.count += 1
        if self.deaths and self.count == 4:
            self.deaths, self.count = self.deaths - 1, 0
            self._reset()
            raise EngineDied("it is gone")
        return super()._advance(sampling)


def test_a_dead_engine_begins_again_with_what_was_known(staggered, scorer):
    expected = collector_of(staggered, scorer, engine_of(staggered))
    engine, deaths = engine_of(staggered, kind=Dies), []
    collector = collector_of(staggered, scorer, engine, revive=deaths.append)
    for step in (1, 2, 3):
        engine.deaths, engine.count = 1, 0
        ours, theirs = collector.collect(step), expected.collect(step)
        assert [r[:4] for r in fingerprint(ours)] == [r[:4] for r in fingerprint(theirs)]
    assert len(deaths) == 3
    engine.deaths, engine.count, collector.underway.generator = 1, 0, Generator(engine, staggered.tokenizer, scorer)
    with pytest.raises(EngineDied):
        collector.collect(4)


def collect_on(ranks: Ranks, folder) -> tuple[list[list[tuple]], list[dict], int]:
    """Four steps' rollouts, what is under way after them, and how many tokens this rank sampled."""
    policy = Policy.load(folder, CPU, PolicyConfig(), ranks)
    engine = LocalEngine(policy.sampler, policy.end_ids(), 64, 64)
    hand_over(policy, engine, 0)
    scorer = Scorer({"_target_": "tests.rewards.hash_of_answer"}, workers=1, timeout=5)
    try:
        config = Config(rollout=RolloutConfig(**ROLLOUT, oversample=1.5))
        collector = Collector(Generator(engine, policy.tokenizer, scorer, ranks), TASKS, config, 0)
        batches = [collector.collect(step) for step in range(4)]
        return [fingerprint(batch) for batch in batches], collector.state()["underway"], engine.stats.sampled_tokens
    finally:
        scorer.close()


@pytest.mark.slow
def test_ranks_agree_on_the_groups_that_end_first(folder_of):
    results = on_ranks(2, collect_on, folder_of("staggered"))
    again = on_ranks(2, collect_on, folder_of("staggered"))
    assert results == again  # the groups do not depend on which rank is faster
    (steps, state, mine), (other_steps, other_state, theirs) = results
    assert (steps, state) == (other_steps, other_state)
    assert 0.5 < mine / theirs < 2
    for step in steps:
        assert len(step) == 12
        assert all(reward is not None for *_, reward in step)
    one, _, _ = collect_on(Ranks(), folder_of("staggered"))
    by_key = {(r[1], r[2]): r for step in one for r in step}
    both = [r for step in steps for r in step if (r[1], r[2]) in by_key]
    assert len(both) > 24
    assert all(r[3] == by_key[r[1], r[2]][3] for r in both)


def test_groups_under_way():
    assert [extra_groups(o, 8) for o in (1.0, 1.05, 1.25, 1.5, 2.0)] == [0, 1, 2, 4, 8]
    assert extra_groups(1.1, 10) == 1
    assert extra_groups(1.0, 1000) == 0


def test_shares_and_means_by_lag():
    rollout = Rollout("t", 0, 0, 0, [1])
    rollout.add_sampled([5, 6, 7, 8], [-1.0] * 4, [(2, 1), (3, 1), (5, 2)])
    found = lags(rollout, 5)
    assert found.tolist() == [3, 2, 0, 0]
    assert shares_by_lag(found) == {"0": 0.5, "2": 0.25, "3": 0.25}
    assert means_by_lag(found, torch.tensor([1.0, 2.0, 3.0, 5.0]).numpy()) == {"0": 4.0, "2": 2.0, "3": 1.0}
