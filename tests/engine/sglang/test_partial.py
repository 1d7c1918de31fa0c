"""Groups that take several steps with the real SGLang, which decides by its own clock which groups end first."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from hybrid_rl.policy.model import Policy
from hybrid_rl.rollout.rewards import Scorer
from tests.rollout.test_partial import at_once, collector_of, sampled

CAPACITY = 64


@pytest.fixture(scope="module")
def scorer():
    made = Scorer({"_target_": "tests.rewards.hash_of_answer"}, workers=1, timeout=5)
    yield made
    made.close()


def test_continued_groups_have_the_tokens_of_groups_sampled_at_once(make_engine, folder_of, scorer):
    engine = make_engine(folder_of("staggered"), slots=64, capacity=CAPACITY)
    policy = Policy.load(folder_of("staggered"), torch.device("cpu"))
    collector, everything = collector_of(policy, scorer, engine), []
    for version in range(4):
        engine.set_version(version)
        before, batch = engine.stats.sampled_tokens, collector.collect(version + 1)
        assert len(batch.rollouts) == 12
        assert batch.partial.left == 2
        assert batch.partial.tokens == engine.stats.sampled_tokens - before
        everything += [r for group in batch.all_groups for r in group.rollouts]
        engine.sleep()
        engine.wake()
    # in SGLang's random streams, so by what an engine that nothing interrupts samples
    engine.set_version(0)
    for r, (ids, logprobs) in zip(everything, at_once(policy, everything, engine), strict=True):
        assert sampled(r)[0] == ids
        assert sampled(r)[1] == pytest.approx(logprobs, abs=1e-4)
        assert [v for v, _ in r.versions] == sorted({v for v, _ in r.versions})


def test_every_token_has_the_log_probability_of_the_weights_that_sampled_it(
    make_engine, folder_of, reference_of, scorer
):
    folders = [folder_of("staggered", seed=seed) for seed in range(4)]
    engine = make_engine(folders[0], slots=64, capacity=CAPACITY)
    policy = Policy.load(folders[0], torch.device("cpu"))
    collector, mixed = collector_of(policy, scorer, engine), 0
    for version, folder in enumerate(folders):
        engine.update_weights([load_file(folder / "model.safetensors")], version)
        for r in collector.collect(version + 1).rollouts:
            ids, logprobs = sampled(r)
            of = [v for v, count in r.versions for _ in range(count)]
            prompt = r.token_ids[: r.prompt_length].tolist()
            exact = {v: reference_of(folders[v]).logprobs(prompt, ids, 1.0).tolist() for v in set(of)}
            assert logprobs == pytest.approx([exact[v][i] for i, v in enumerate(of)], abs=1e-4)
            mixed += len(set(of)) > 1
    assert mixed >= 1
