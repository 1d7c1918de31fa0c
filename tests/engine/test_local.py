import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from hybrid_rl.engine import local
from hybrid_rl.engine.base import Request, Sampling, append_version
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.policy.layout import pack, sampled_tokens
from hybrid_rl.policy.model import Policy
from hybrid_rl.types import Rollout
from tests.device import DEVICE, in_float32
from tests.engine_contract import PROMPTS, EngineContract, collect, requests, tokens

pytestmark = pytest.mark.gpu
SAMPLING = Sampling(max_tokens=8)


def engine_on(policy: Policy, slots: int = 8, capacity: int = 64) -> LocalEngine:
    engine = LocalEngine(policy.model, policy.end_ids(), slots, capacity, policy.device)
    engine.set_version(0)
    return engine


class TestLocalEngine(EngineContract):
    @pytest.fixture
    def make_engine(self) -> Callable[..., LocalEngine]:
        return lambda folder, slots=8, capacity=64: engine_on(
            Policy.load(folder, DEVICE, in_float32()), slots, capacity
        )


def test_peak_kv_bytes_are_the_arithmetic(policy: Policy) -> None:
    engine = engine_on(policy, slots=5, capacity=48)
    assert engine.stats.peak_kv_bytes == 0
    collect(engine, requests(), SAMPLING)
    keys_and_values = (
        2 * 2 * 5 * 2 * 48 * 16 * 4
    )  # two tensors · layers · slots · kv heads · capacity · head_dim · float32
    bias = 5 * 48 * 4
    assert engine.stats.peak_kv_bytes == engine.sleep() == keys_and_values + bias
    engine.wake()
    collect(engine, requests(), SAMPLING)
    assert engine.stats.peak_kv_bytes == keys_and_values + bias


def test_after_sleep_the_cache_is_gone(policy: Policy) -> None:
    """No tensor of the cache's shapes is alive anywhere, not even behind a suspended generator."""

    def alive() -> int:
        gc.collect()
        return sum(
            t.shape[0] == 5 and 48 in t.shape for t in gc.get_objects() if type(t) is torch.Tensor and t.dim() > 1
        )

    engine = engine_on(policy, slots=5, capacity=48)
    collect(engine, requests(), SAMPLING)
    stream = engine.generate(requests(), SAMPLING)
    next(stream)
    assert alive() == 2 * 2 + 1
    engine.abort()
    engine.sleep()
    assert alive() == 0
    assert len(list(stream)) < len(requests()) - 1  # what had ended in the same step, and no more


def test_sleep_says_when_the_memory_is_still_held(policy: Policy) -> None:
    engine = engine_on(policy)
    collect(engine, requests(), SAMPLING)
    holder = engine._cache.keys[0]
    with pytest.raises(local.EngineError, match="still refers"):
        engine.sleep()
    del holder


def test_a_prompts_prefix_is_dropped_with_its_last_request(policy: Policy) -> None:
    engine = engine_on(policy, slots=6)
    stream = engine.generate([Request(i, PROMPTS[i // 4], seed=i) for i in range(12)], SAMPLING)
    held = []
    for _ in stream:
        held.append(set(engine._prefixes))
    assert held[0] == {tuple(PROMPTS[1])}  # four of the first and two of the second were admitted
    assert held[-1] == set()


def test_close_lets_the_cache_go(policy: Policy) -> None:
    engine = engine_on(policy)
    next(stream := engine.generate(requests(), SAMPLING))
    cache = weakref.ref(engine._cache)
    engine.close()
    assert cache() is None
    assert len(list(stream)) < len(requests()) - 1  # what had ended in the same step, and no more


def test_it_samples_from_the_policys_own_memory(policy: Policy) -> None:
    engine = engine_on(policy)
    assert engine.shares(policy.sampler)
    assert policy.sampler is policy.model
    before = collect(engine, requests(), SAMPLING)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter, memory_format=torch.contiguous_format))
    engine.set_version(1)
    after = collect(engine, requests(), SAMPLING)
    assert tokens(after) != tokens(before)
    assert tokens(after) == tokens(collect(engine_on(policy), requests(), SAMPLING))


def test_a_tied_head_follows_the_embeddings(policy: Policy, folder_of) -> None:
    engine = engine_on(policy)
    new = dict(Policy.load(folder_of("qwen3", seed=1), DEVICE, in_float32()).model.state_dict())
    engine.update_weights(
        [{k: v for k, v in new.items() if k != "model.embed_tokens.weight"}], 1
    )  # under its other name
    assert torch.equal(policy.model.get_input_embeddings().weight, new["lm_head.weight"])
    assert policy.model.lm_head.weight is policy.model.model.embed_tokens.weight


def test_sampling_leaves_no_trace_in_the_policy(policy: Policy) -> None:
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    collect(engine_on(policy), requests(), SAMPLING)
    assert policy.model.training
    assert all(p.grad is None and p.requires_grad for p in policy.model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.model.state_dict().items())


@pytest.mark.parametrize("prefill_tokens", [1, 12, 40])
def test_prompts_go_through_the_model_in_pieces(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, prefill_tokens: int
) -> None:
    expected = collect(engine_on(policy), requests(), SAMPLING)
    monkeypatch.setattr(local, "PREFILL_TOKENS", prefill_tokens)
    engine = engine_on(policy, slots=64)
    assert tokens(collect(engine, requests(), SAMPLING)) == tokens(expected)
    assert engine.stats.computed_prompt_tokens == sum(len(p) for p in PROMPTS)


def test_old_cache_contents_never_show(policy: Policy) -> None:
    """A slot that held a long completion is used by a short one, with no trace of what lies behind its end."""
    engine = engine_on(policy, slots=2)
    collect(engine, [Request(i, list(range(40)), i) for i in range(2)], Sampling(max_tokens=20))
    with torch.inference_mode():
        for tensor in (*engine._cache.keys, *engine._cache.values):
            tensor.mul_(1e6)
    assert tokens(collect(engine, requests(), SAMPLING)) == tokens(collect(engine_on(policy), requests(), SAMPLING))


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("layout", ["padded", "packed", "trees"])
def test_trainer_and_engine_agree_on_what_was_sampled(policy: Policy, temperature: float, layout: str) -> None:
    out = collect(engine_on(policy), requests(), Sampling(temperature, max_tokens=16))
    rollouts = []
    for request in requests():
        r = Rollout("t", request.id // 4, request.id % 4, request.seed, list(request.prompt_ids))
        r.add_sampled(out[request.id].token_ids, out[request.id].logprobs, out[request.id].versions)
        rollouts.append(r)
    behaviour = sampled_tokens(rollouts, DEVICE).behaviour_logprobs
    ratios = torch.cat(
        [
            (policy.logprobs(row, temperature)[0] - behaviour[row.token_index]).exp()
            for row in (row.to(DEVICE) for row in pack(rollouts, layout, 256))
        ]
    )
    assert (ratios - 1).abs().max() < 2e-5


def test_append_version_keeps_runs() -> None:
    assert append_version([], 3, 2) == [(3, 2)]
    assert append_version([(0, 4)], 0, 2) == [(0, 6)]
    assert append_version([(0, 4)], 1, 2) == [(0, 4), (1, 2)]
    assert append_version([(0, 4)], 1, 0) == [(0, 4)]
    assert append_version([], 1, 0) == []
    given = [(0, 4)]
    append_version(given, 0, 1)
    assert given == [(0, 4)]
