"""Weights from the policy to an engine that shares them, and to one that has its own."""

import pytest
import torch

from hybrid_rl.engine.base import Sampling
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.handover import HandoverError, hand_over
from hybrid_rl.policy.model import Policy
from hybrid_rl.types import Rollout


def engine_of(policy: Policy) -> LocalEngine:
    return LocalEngine(policy.model, policy.end_ids(), 8, 64)


@pytest.fixture(params=["qwen3", "llama"])  # tied and untied embeddings
def pair(request, folder_of):
    """A policy, and an engine with a copy of other weights."""
    policy = Policy.load(folder_of(request.param), torch.device("cpu"))
    other = Policy.load(folder_of(request.param, 1), torch.device("cpu"))
    return policy, engine_of(other)


def test_shared_memory_needs_no_copy(policy):
    engine = engine_of(policy)
    assert hand_over(policy, engine, 3, verify=True) == 0
    assert engine.version == 3
    assert engine.shares(policy.sampler)


@pytest.mark.parametrize("bucket_bytes", [1, 1024, 2**30])
def test_every_bucket_size_gives_bit_equal_weights(pair, bucket_bytes):
    policy, engine = pair
    moved = hand_over(policy, engine, 1, verify=True, bucket_bytes=bucket_bytes)
    assert moved == sum(t.nbytes for t in policy.parameters.values())
    for name, tensor in policy.model.state_dict().items():
        assert torch.equal(engine.weights()[name], tensor)


def test_the_engine_samples_from_the_new_weights(pair):
    policy, engine = pair
    from hybrid_rl.engine.base import Request

    request, greedy = [Request(0, [5, 9, 11], seed=1)], Sampling(temperature=0.0, max_tokens=8)
    hand_over(policy, engine, 1)
    (ours,) = engine_of_version(policy).generate(request, greedy)
    (theirs,) = engine.generate(request, greedy)
    assert theirs.token_ids == ours.token_ids
    assert theirs.logprobs == ours.logprobs
    assert theirs.versions == [(1, len(theirs.token_ids))]


def engine_of_version(policy: Policy) -> LocalEngine:
    engine = engine_of(policy)
    hand_over(policy, engine, 1)
    return engine


def test_verify_finds_a_single_wrong_value(pair):
    policy, engine = pair
    hand_over(policy, engine, 1, verify=True)
    load = engine.update_weights

    def lossy(bucket_list, version):
        load(bucket_list, version)
        name = list(engine.weights())[3]
        engine.weights()[name].view(-1)[5] += 1e-3

    engine.update_weights = lossy
    with pytest.raises(HandoverError, match="differs from the policy's"):
        hand_over(policy, engine, 2, verify=True)


def test_buckets_hold_every_weight_once_and_respect_their_size(policy):
    for size in (1, 5000, 10**9):
        made = list(policy.buckets(torch.float32, size))
        assert [name for b in made for name in b] == list(policy.parameters)
        assert all(len(b) == 1 or sum(t.nbytes for t in b.values()) <= size for b in made)


def test_the_mismatch_of_one_step_is_below_a_millionth(policy):
    """Engine and trainer on the same weights: mean ρ − 1 − log ρ over sampled tokens, float32, T = 1 and T ≠ 1."""
    from hybrid_rl.algo.mismatch import mismatch_kl
    from hybrid_rl.engine.base import Request
    from hybrid_rl.policy.layout import pack, sampled_tokens

    for temperature in (1.0, 0.6):
        engine = engine_of_version(policy)
        rollouts = []
        for c in engine.generate([Request(i, [5, 9, 11], seed=i) for i in range(16)], Sampling(temperature=temperature, max_tokens=32)):
            rollouts.append(Rollout("t", 0, c.id, c.id, [5, 9, 11]))
            rollouts[-1].add_sampled(c.token_ids, c.logprobs, c.versions)
        tokens = sampled_tokens(rollouts)
        (row,) = pack(rollouts, "trees", 2048)
        with torch.no_grad():
            logprobs, _ = policy.logprobs(row, temperature)
        assert mismatch_kl(logprobs, tokens.behaviour_logprobs[row.token_index]).mean() < 1e-6
