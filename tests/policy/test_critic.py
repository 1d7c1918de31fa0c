"""The critic: what it predicts, what it learns from, and where it waits while others compute."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid_rl.algo.batch import Given
from hybrid_rl.algo.ppo_clip import loss as ppo_loss
from hybrid_rl.config import (
    AlgoConfig,
    Config,
    CriticConfig,
    LoraConfig,
    Offload,
    OptimizerConfig,
    PolicyConfig,
    Precision,
    TinyConfig,
)
from hybrid_rl.model_folder.read import ModelError
from hybrid_rl.policy import tiny
from hybrid_rl.policy.critic import Critic, ValueModel, value_loss
from hybrid_rl.policy.layout import sampled_tokens
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.optimizer import Optimizer
from hybrid_rl.policy.roles import make_critic
from hybrid_rl.policy.sharding import local
from hybrid_rl.preflight.budget import Sizes, memory_by_phase, models_beside
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.types import Rollout
from tests.policy.test_sharding import ADVANTAGES, Recorder, rollouts
from tests.ranks import on_ranks
from tests.updates import rows_of, update

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
CLIP = 0.5
GAE = {"_target_": "hybrid_rl.algo.gae.advantages"}


def every_rank(world: int, function, *arguments) -> list:
    """One rank without a process group, as a run has it, or several with one."""
    return [function(Ranks(), *arguments)] if world == 1 else on_ranks(world, function, *arguments)


def random_head(hidden: int) -> Tensor:
    """[hidden]: values of about 1 in size."""
    return torch.randn(hidden, generator=torch.Generator().manual_seed(1)) / math.sqrt(hidden)


@torch.no_grad()
def with_head(model: ValueModel) -> None:
    weight = model.model.get_output_embeddings().weight
    whole = random_head(weight.shape[1])[None]
    weight.copy_(
        distribute_tensor(whole, weight.device_mesh, weight.placements) if isinstance(weight, DTensor) else whole
    )


def critic_of(
    folder: Path, settings: PolicyConfig | None = None, ranks: Ranks | None = None, lr: float = 1e-3, clip: float = CLIP
) -> Critic:
    model = ValueModel.load(folder, CPU, settings or PolicyConfig(), ranks)
    offload = model.settings.offload != Offload.none
    return Critic(model, Optimizer(model.trainable, OptimizerConfig(lr=lr), 10, 3, offload=offload), clip)


def whole(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in tensors.items()}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(t, theirs[name]) for name, t in ours.items())


# ---- what it predicts ------------------------------------------------------------------------------------------------


def textbook(folder: Path, batch: list[Rollout]) -> tuple[Tensor, torch.nn.Module, Tensor]:
    """V of each sampled token, [N] float64, by plain transformers on each sample alone; the trunk and the head it came from."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **plain)
    head = random_head(model.config.hidden_size).double().requires_grad_()
    values = []
    for r in batch:
        hidden = model.base_model(torch.tensor([r.token_ids])).last_hidden_state[0]
        values += [hidden[t - 1] @ head for t, sampled in enumerate(r.loss_mask) if sampled]
    return torch.stack(values), model.base_model, head


def predicted(ranks: Ranks, folder: Path, settings: PolicyConfig) -> Tensor:
    critic = critic_of(folder, settings, ranks)
    with_head(critic.model)
    values = critic.values(rollouts())
    assert ranks.world == 1 or all(
        isinstance(p, DTensor) for p in critic.model.model.parameters()
    )  # nothing is left whole
    assert not values.requires_grad
    return values


@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt_neox", "gemma", "qwen3_moe"])  # tied heads and untied ones
@pytest.mark.parametrize(
    ("world", "layout", "row_tokens"), [(1, "trees", 2048), (1, "packed", 40), (1, "padded", 60), (2, "trees", 60)]
)
def test_values_are_a_head_on_the_hidden_state_before_the_token(folder_of, name, world, layout, row_tokens):
    expected, _, _ = textbook(folder_of(name), rollouts())
    assert expected.std() > 0.3
    for values in every_rank(world, predicted, folder_of(name), rows_of(layout, row_tokens)):
        assert values.dtype == torch.float32
        torch.testing.assert_close(values.double(), expected.detach(), rtol=1e-4, atol=1e-4)


def test_values_in_half_precision_and_on_three_ranks(tiny_folder):
    expected, _, _ = textbook(tiny_folder, rollouts())
    for values in on_ranks(3, predicted, tiny_folder, rows_of("packed", 60)):
        torch.testing.assert_close(values.double(), expected.detach(), rtol=1e-4, atol=1e-4)
    for values in on_ranks(2, predicted, tiny_folder, rows_of("packed", 60, dtype=Precision.bfloat16)):
        assert 0 < (values - expected).abs().mean() < 0.1


def begun(ranks: Ranks, folder: Path, lora_config: LoraConfig, path: str | None) -> dict[str, Any]:
    """A critic beside a policy that was trained before, as SFT does."""
    torch.manual_seed(0)
    policy = Policy.load(folder, CPU, rows_of(row_tokens=100, lora=lora_config), ranks)
    optimizer = Optimizer(policy.trainable, OptimizerConfig(lr=1e-2), 2, 3)
    for seed in range(2):
        update(policy, optimizer, rollouts(seed=seed), ADVANTAGES, ppo_loss)
    before = whole(policy.parameters)
    critic = make_critic(policy, CriticConfig(path=path), folder, 2, None)
    merged = {name: t.clone() for bucket in policy.buckets(torch.float32, 2**20) for name, t in bucket.items()}
    return {
        "values": critic.values(rollouts()),
        "weights": whole(critic.model.parameters),
        "policy": merged,
        "policy stays": same(before, whole(policy.parameters)),
        "all trained": critic.model.trainable.keys() == critic.model.parameters.keys(),
        "apart": not {local(p).data_ptr() for p in policy.parameters.values()} & {local(p).data_ptr() for p in critic.model.parameters.values()},
    }  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3", "llama"])
@pytest.mark.parametrize("lora_config", [LoraConfig(), LoraConfig(rank=3)], ids=["all weights", "adapters"])
@pytest.mark.parametrize("world", [1, 2])
def test_it_begins_as_the_policy_is_now_and_predicts_nothing(folder_of, name, lora_config, world):
    for found in every_rank(world, begun, folder_of(name), lora_config, None):
        assert found["policy stays"] and found["all trained"] and found["apart"]  # noqa: PT018
        assert torch.equal(found["values"], torch.zeros(sum(r.sampled for r in rollouts())))
        head = found["weights"].pop("lm_head.weight")
        assert torch.equal(head, torch.zeros(1, 32))
        found["policy"].pop("lm_head.weight", None)
        assert same(found["weights"], found["policy"])
        plain = dict(AutoModelForCausalLM.from_pretrained(folder_of(name)).named_parameters())
        assert not torch.equal(
            found["weights"]["model.layers.0.mlp.up_proj.weight"], plain["model.layers.0.mlp.up_proj.weight"]
        )


def test_it_begins_as_another_folder_where_one_is_named(folder_of):
    other = folder_of("llama", 3)
    plain = dict(AutoModelForCausalLM.from_pretrained(other).named_parameters())
    found = begun(Ranks(), folder_of("qwen3"), LoraConfig(), str(other))
    assert found["weights"].pop("lm_head.weight").shape == (1, 32)
    assert all(torch.equal(t, plain[name]) for name, t in found["weights"].items())


def test_a_folder_with_other_tokens_is_refused(tiny_folder, tmp_path):
    tiny.create(tmp_path, TinyConfig(layers=1, hidden_size=32, words=["other"]), 0)
    policy = Policy.load(tiny_folder, CPU)
    with pytest.raises(ModelError, match=r"algo\.critic\.path=.* its tokenizer is not the policy's"):
        make_critic(policy, CriticConfig(path=str(tmp_path)), tiny_folder, 1, None)
    with pytest.raises(ModelError, match=r"^algo\.critic\.path=/nowhere"):
        make_critic(policy, CriticConfig(path="/nowhere"), tiny_folder, 1, None)


# ---- what it learns from ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss", "clipped"),
    [
        (0.5, 0.0, 1.0, 0.0, 0.125, False),  # no clip
        (0.1, 0.0, 1.0, 0.2, 0.405, False),  # inside the band
        (0.5, 0.0, 1.0, 0.2, 0.32, True),  # has moved far enough towards the target
        (-0.5, 0.0, 1.0, 0.2, 1.125, False),  # has moved away: the larger loss counts
        (-0.5, 0.0, -1.0, 0.2, 0.32, True),
        (2.0, 0.0, 1.0, 0.2, 0.5, False),  # past the target, farther than the band's edge is on this side
        (1.1, 0.0, 1.0, 0.2, 0.32, True),
        (3.0, 3.0, 1.0, 0.2, 2.0, False),  # not moved
    ],
)
def test_value_clipping_by_hand(value, old, target, clip, loss, clipped):
    v = torch.tensor([value], requires_grad=True)
    losses, is_clipped = value_loss(v, torch.tensor([old]), torch.tensor([target]), clip)
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss)
    assert is_clipped.tolist() == [clipped]
    assert v.grad is not None
    assert v.grad.item() == pytest.approx(0.0 if clipped else value - target)


@given(st.lists(st.tuples(*[st.floats(-3, 3)] * 3), min_size=1, max_size=20), st.floats(0.01, 2))
def test_value_loss_is_its_definition(numbers, clip):
    values, old, targets = torch.tensor(numbers, dtype=torch.float64).unbind(-1)
    losses, _ = value_loss(values, old, targets, clip)
    for loss, (v, v_old, r) in zip(losses.tolist(), numbers, strict=True):
        held = v_old + min(clip, max(-clip, v - v_old))
        assert loss == pytest.approx(0.5 * max((v - r) ** 2, (held - r) ** 2), abs=1e-12)


def facts(batch: list[Rollout]) -> tuple[Tensor, Tensor, Given]:
    """Old values, targets, and tokens of different weights, some of none."""
    tokens = sampled_tokens(batch)
    n, generator = len(tokens), torch.Generator().manual_seed(2)
    old, targets = torch.randn(2, n, generator=generator)
    weights = torch.rand(n, generator=generator) * (torch.rand(n, generator=generator) > 0.1)
    zeros = torch.zeros(n)
    return old, targets, Given(zeros, zeros, zeros, tokens.rollout_index, torch.ones(n), weights, 7.5)


def gradient(ranks: Ranks, folder: Path, settings: PolicyConfig) -> tuple[dict, dict]:
    critic, batch = critic_of(folder, settings, ranks), rollouts()
    with_head(critic.model)
    recorder = Recorder(critic.model)
    critic.optimizer = cast(Optimizer, recorder)
    recorder.unpark = lambda: None  # type: ignore[attr-defined]
    statistics = critic.update(batch, *facts(batch)).numbers
    return recorder.gradient, statistics


def check_gradient(folder: Path, results: list[tuple[dict, dict]]) -> None:
    """Against autograd in float64, every token's loss written out: within 1e-5 of a tensor's largest number."""
    batch = rollouts()
    values, trunk, head = textbook(folder, batch)
    old, targets, given_ = facts(batch)
    total, clips = torch.zeros((), dtype=torch.float64), 0
    for v, v_old, r, w in zip(values, old.double(), targets.double(), given_.weights.double(), strict=True):
        held = v_old + torch.clamp(v - v_old, -CLIP, CLIP)
        total = total + w * 0.5 * torch.maximum((v - r) ** 2, (held - r) ** 2) / 7.5
        clips += bool(
            (v - v_old).abs() > CLIP and (held - r) ** 2 > (v - r) ** 2
        )  # inside the band held is v but for rounding
    total.backward()
    assert 0 < clips < len(old)
    expected = {f"model.{name}": p.grad for name, p in trunk.named_parameters()} | {
        "lm_head.weight": cast(Tensor, head.grad)[None]
    }
    for ours, statistics in results:
        assert statistics["value_loss"] == pytest.approx(total.item(), rel=1e-5)
        assert statistics["value_clip"] == pytest.approx(clips / len(old))
        assert ours.keys() == expected.keys()
        for name, theirs in expected.items():
            assert theirs is not None
            assert (ours[name] - theirs).abs().max() <= 1e-5 * theirs.abs().max(), name


@pytest.mark.parametrize("layout", ["padded", "packed", "trees"])
@pytest.mark.parametrize("row_tokens", [2048, 60, 30])
def test_the_gradient_is_the_textbooks_in_every_layout_and_split(tiny_folder, layout, row_tokens):
    check_gradient(tiny_folder, [gradient(Ranks(), tiny_folder, rows_of(layout, row_tokens))])


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, PolicyConfig()),
        (3, PolicyConfig()),
        (2, PolicyConfig(shard=1)),
        (4, PolicyConfig(shard=2)),
        (2, PolicyConfig(activation_checkpointing=True)),
    ],
)
def test_the_gradient_is_the_same_on_several_ranks(tiny_folder, world, settings):
    check_gradient(tiny_folder, on_ranks(world, gradient, tiny_folder, replace(settings, row_tokens=60)))


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(tiny_folder):
    critic, batch = critic_of(tiny_folder, rows_of(row_tokens=60)), rollouts()
    old, targets, given_ = facts(batch)
    before = whole(critic.model.parameters)
    done = critic.update(batch, old, targets.index_fill(0, torch.tensor([3]), math.nan), given_)
    assert done.numbers["skipped"] == 1.0
    assert done.fault is not None
    assert (done.fault.what, done.fault.task_id) == ("value loss", batch[0].task_id)
    assert same(before, whole(critic.model.parameters))
    done = critic.update(batch, old, targets, given_)
    assert (done.numbers["skipped"], done.fault) == (0.0, None)
    assert not same(before, whole(critic.model.parameters))


def predictable(seed: int, count: int) -> tuple[list[Rollout], Tensor]:
    """Rollouts of random tokens; the return of all tokens is 1 where the prompt has the token "7" and 0 where it has not, [N]."""
    generator = torch.Generator().manual_seed(seed)
    made, returns = [], []
    for group in range(count):
        prompt = torch.randint(20, 60, (5,), generator=generator).tolist()
        if lucky := bool(torch.rand((), generator=generator) < 0.5):
            prompt[int(torch.randint(0, 5, (), generator=generator))] = 7
        ids = torch.randint(20, 60, (int(torch.randint(3, 8, (), generator=generator)),), generator=generator).tolist()
        made.append(Rollout(f"t{group}", group, 0, 0, prompt))
        made[-1].add_sampled(ids, [-1.0] * len(ids), [(0, len(ids))])
        returns += [float(lucky)] * len(ids)
    return made, torch.tensor(returns)


def explained(values: Tensor, targets: Tensor) -> float:
    return float(1 - (targets - values).var() / targets.var())


@pytest.mark.parametrize("related", [True, False])
def test_explained_variance_rises_where_the_prompt_tells_the_return(tmp_path, related):
    """On rollouts that it has not seen; and not where returns have nothing to do with the prompt."""
    tiny.create(tmp_path, TinyConfig(layers=2, hidden_size=32, intermediate_size=64, head_dim=16), 0)
    critic = critic_of(tmp_path, lr=3e-3, clip=0.2)
    unseen, unseen_returns = predictable(-1, 64)
    course = [explained(critic.values(unseen), unseen_returns)]
    for step in range(30):
        batch, returns = predictable(step, 64)
        if not related:
            returns = torch.cat(
                [
                    torch.rand(1, generator=torch.Generator().manual_seed(i)).round().expand(r.sampled)
                    for i, r in enumerate(batch)
                ]
            )
        ones = torch.ones(len(returns))
        given_ = Given(ones, ones, ones, sampled_tokens(batch).rollout_index, ones, ones, float(len(returns)))
        critic.update(batch, critic.values(batch), returns, given_)
    course.append(explained(critic.values(unseen), unseen_returns))
    assert course[0] == 0.0
    assert course[1] > 0.9 if related else course[1] < 0.1, course


# ---- where it waits --------------------------------------------------------------------------------------------------


def storages(critic: Critic) -> int:
    tensors = [
        *critic.model.parameters.values(),
        *(t for n, t in critic.optimizer.tensors().items() if not n.endswith(".step")),
    ]
    return sum({(s := local(t).untyped_storage()).data_ptr(): s.size() for t in tensors}.values())


def parked(ranks: Ranks, folder: Path, settings: PolicyConfig) -> dict[str, Any]:
    critic, batch = critic_of(folder, replace(settings, row_tokens=60), ranks), rollouts()
    critic.update(batch, *facts(batch))
    values, weights, moments, full = (
        critic.values(batch),
        whole(critic.model.parameters),
        whole(critic.optimizer.tensors()),
        storages(critic),
    )
    critic.park()
    critic.park()
    idle = storages(critic)
    found = {"idle": idle / full, "values": torch.equal(critic.values(batch), values)}
    critic.park()
    critic.unpark()
    found["weights"] = same(weights, whole(critic.model.parameters))
    found["moments"] = same(moments, whole(critic.optimizer.tensors()))
    critic.park()
    critic.update(batch, *facts(batch))
    found["learns"] = not same(weights, whole(critic.model.parameters))
    return found


@pytest.mark.parametrize(
    ("world", "offload"),
    [(1, Offload.none), (1, Offload.all), (2, Offload.none), (2, Offload.optimizer), (2, Offload.all)],
)
def test_where_it_waits_while_the_engine_samples(tiny_folder, world, offload):
    """On the CPU as policy.offload says; on one rank the weights stay, for they lie in a mapped file."""
    for found in every_rank(world, parked, tiny_folder, PolicyConfig(offload=offload)):
        assert found["values"] and found["weights"] and found["moments"] and found["learns"]  # noqa: PT018
        expected = {Offload.none: 1.0, Offload.optimizer: 1 / 3, Offload.all: 0.0 if world > 1 else 1 / 3}[offload]
        assert found["idle"] == pytest.approx(expected, abs=0.01)


def test_the_plan_counts_it(tiny_folder):
    algo, shape = AlgoConfig(advantage=GAE), AutoConfig.from_pretrained(tiny_folder)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(shape).parameters())
    beside = models_beside(Config(algo=algo), parameters)
    assert beside == {"critic": parameters}
    assert (
        models_beside(Config(algo=AlgoConfig(advantage=GAE, critic=CriticConfig(path=str(tiny_folder)))), 1) == beside
    )
    with pytest.raises(ModelError, match=r"algo\.critic\.path=/nowhere cannot be loaded"):
        models_beside(Config(algo=AlgoConfig(advantage=GAE, critic=CriticConfig(path="/nowhere"))), 1)
    assert models_beside(Config(), parameters) == {}
    unit = 4 * parameters / 2**30
    for ranks, offload, idle in (
        (Ranks(), Offload.none, 3), (Ranks(0, 2, 0, 2), Offload.none, 1.5), (Ranks(0, 2, 0, 2), Offload.optimizer, 0.5),
        (Ranks(0, 2, 0, 2), Offload.all, 0),
    ):  # fmt: skip
        config = Config(algo=algo, policy=PolicyConfig(offload=offload))
        sizes = Sizes(shape, parameters, 0, beside)
        memory = memory_by_phase(config, sizes, CPU, ranks)
        assert memory["sampling"]["critic"] == pytest.approx(idle * unit)
        assert memory["training"]["critic"] == pytest.approx(3 * unit / ranks.world)
        assert memory["training"]["gradients"] == pytest.approx(unit / ranks.world)  # adapters only, say, beside it
        gpu = memory_by_phase(config, sizes, torch.device("cuda"), ranks)
        assert gpu["sampling"]["critic"] == 0
