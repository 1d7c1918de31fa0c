"""The trainer's weights in the real SGLang, version after version: full and adapters, in half precision, and under half-finished completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from hybrid_rl.algo.mismatch import mismatch_kl
from hybrid_rl.config import LoraConfig, OptimizerConfig, PolicyConfig, Precision
from hybrid_rl.engine.base import Completion, Engine, Request, Sampling
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.engine.sglang.engine import SGLangEngine
from hybrid_rl.handover import hand_over, take_back
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.optimizer import Optimizer
from hybrid_rl.policy.sharding import local
from hybrid_rl.policy.update import score
from hybrid_rl.types import Rollout
from tests.engine_contract import collect, requests, tokens
from tests.policy.test_lora import trained

CPU = torch.device("cpu")
CAPACITY = 256
GREEDY = Sampling(temperature=0.0, max_tokens=24)
EngineOf = Callable[..., SGLangEngine]


@pytest.fixture
def engine_of(make_engine, folder_of) -> EngineOf:
    """An engine for a kind of model and precision; it begins with weights that no test's policy has."""
    return lambda name, dtype=torch.float32: make_engine(folder_of(name, seed=1), capacity=CAPACITY, dtype=dtype)


def handed_over(engine: Engine, policy: Policy, version: int, sampling: Sampling) -> dict[int, list[int]]:
    hand_over(policy, engine, version, verify=True, bucket_bytes=20_000)
    out = collect(engine, requests(), sampling)
    assert {v for c in out.values() for v, _ in c.versions} == {version}
    take_back(policy, engine)
    return tokens(out)


def scored(
    policy: Policy, wanted: Sequence[Request], completions: dict[int, Completion]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The trainer's log-probabilities of the sampled tokens, and the engine's."""
    rollouts = []
    for request in wanted:
        c = completions[request.id]
        rollouts.append(Rollout("t", request.id // 4, request.id % 4, 0, list(request.prompt_ids)))
        rollouts[-1].add_sampled(c.token_ids, c.logprobs, c.versions)
    behaviour = torch.tensor([x for request in wanted for x in completions[request.id].logprobs])
    return score(policy, rollouts, 1.0), behaviour


@pytest.mark.parametrize("lora", [0, 3], ids=["full", "adapters"])
@pytest.mark.parametrize("name", ["qwen3", "llama"])  # embeddings tied, untied
def test_its_tokens_follow_the_policy(engine_of: EngineOf, folder_of, name: str, lora: int) -> None:
    """Every handover is compared name by name; the greedy tokens are those of the local engine and change with each version."""
    torch.manual_seed(0)
    policy = Policy.load(folder_of(name), CPU, PolicyConfig(lora=LoraConfig(rank=lora, alpha=2 * lora)))
    optimizer = Optimizer(policy.trainable, OptimizerConfig(lr=1e-2), 4, 3)
    own, embedded, seen = engine_of(name), LocalEngine(policy.sampler, policy.end_ids(), 8, CAPACITY), []
    for version in range(1, 5):
        seen.append(handed_over(own, policy, version, GREEDY))
        assert seen[-1] == handed_over(embedded, policy, version, GREEDY)
        trained(policy, optimizer, 1)
    assert all(now != before for before, now in pairwise(seen))


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_half_precision_under_float32_parameters(engine_of: EngineOf, folder_of, name: str) -> None:
    """Both sides compute in bfloat16, each in its own order; the trainer's parameters stay float32."""
    policy, engine = (
        Policy.load(folder_of(name), CPU, PolicyConfig(dtype=Precision.bfloat16)),
        engine_of(name, torch.bfloat16),
    )
    assert policy.dtype == engine.dtype == torch.bfloat16
    hand_over(policy, engine, 1, verify=True)
    held = engine.weights()
    for key, parameter in policy.parameters.items():
        assert local(parameter).dtype == torch.float32
        assert torch.equal(held[key], local(parameter).bfloat16())
    completions = collect(engine, requests(), Sampling(max_tokens=24))
    take_back(policy, engine)
    own, behaviour = scored(policy, requests(), completions)
    assert 0 < mismatch_kl(own, behaviour).mean() < 1e-3  # measured: 5e-5 and 2e-4


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_each_part_of_a_completion_has_the_probabilities_of_its_own_version(
    engine_of: EngineOf, folder_of, name: str
) -> None:
    """Completions that go on under new weights twice, those that an abort stopped wherever they were included."""
    policy, engine, wanted = Policy.load(folder_of(name), CPU), engine_of(name), requests()
    optimizer = Optimizer(policy.trainable, OptimizerConfig(lr=1e-2), 3, 3)
    weights, done, begun = {}, {}, {}
    for version, limit in ((1, 20), (2, 120), (3, 160)):
        hand_over(policy, engine, version, verify=True)
        weights[version] = {key: p.detach().clone() for key, p in policy.parameters.items()}
        rest = [
            replace(r, sampled_ids=c.token_ids, sampled_logprobs=c.logprobs, versions=c.versions)
            if (c := begun.get(r.id))
            else r
            for r in wanted
            if r.id not in done
        ]
        for c in engine.generate(rest, Sampling(max_tokens=limit)):
            (done if c.finish_reason == "stop" or version == 3 else begun)[c.id] = c
            if version == 2:
                begun |= {c.id: c for c in engine.abort()}
        take_back(policy, engine)
        trained(policy, optimizer, 1)
    assert sorted(done) == [r.id for r in wanted]
    assert max(len(c.versions) for c in done.values()) == 3
    sampled_under = torch.tensor([v for r in wanted for v, count in done[r.id].versions for _ in range(count)])
    for version, held in weights.items():
        with torch.no_grad():
            for key, p in policy.parameters.items():
                p.copy_(held[key])
        own, behaviour = scored(policy, wanted, done)
        off = (own - behaviour).abs()
        assert off[sampled_under == version].max() < 1e-4
        assert off[sampled_under != version].max() > 0.1
