"""The policy over several ranks: whatever their number, the numbers are those of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from hybrid_rl.algo.ppo_clip import loss as ppo_loss
from hybrid_rl.config import Offload, OptimizerConfig, PolicyConfig, Precision
from hybrid_rl.engine.base import Request, Sampling
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.handover import hand_over, take_back
from hybrid_rl.model_folder.read import ModelError
from hybrid_rl.policy.layout import pack, share_out
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.optimizer import Optimizer
from hybrid_rl.policy.sharding import local
from hybrid_rl.policy.update import imitate, score
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.types import Rollout
from tests.device import DEVICE, in_float32
from tests.ranks import on_ranks
from tests.updates import rows_of, update

pytestmark = pytest.mark.slow  # each starts several ranks, or whole runs


def rollouts(groups: int = 3, size: int = 4, seed: int = 0) -> list[Rollout]:
    """Groups with prompts and completions of various lengths, recorded far enough off that some ratios clip."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for group in range(groups):
        prompt = torch.randint(3, 60, (4 + group,), generator=generator).tolist()
        for index in range(size):
            n = int(torch.randint(1, 14, (), generator=generator))
            ids = torch.randint(3, 60, (n,), generator=generator).tolist()
            made.append(Rollout(f"t{group}", group, index, 0, list(prompt)))
            made[-1].add_sampled(ids, (-6 * torch.rand(n, generator=generator)).tolist(), [(0, n)])
    return made


ADVANTAGES = torch.linspace(-1.5, 2, 12).tolist()


class Recorder:
    """Stands where the optimizer does, and keeps the whole gradient."""

    def __init__(self, policy: Policy, scale: float = 1.0):
        self.policy, self.scale = policy, scale
        self.optimizer = Optimizer({"p": torch.nn.Parameter(torch.zeros(1))}, OptimizerConfig(), 1, 1)

    def step(self):
        full = lambda g: g.full_tensor() if hasattr(g, "full_tensor") else g.clone()  # noqa: E731
        self.gradient = {name: full(p.grad) for name, p in self.policy.parameters.items() if p.grad is not None}
        self.policy.model.zero_grad()
        return self.optimizer.step()


def gradient_and_statistics(ranks: Ranks, folder: Path, settings: PolicyConfig) -> tuple[dict, ...]:
    policy = Policy.load(folder, DEVICE, settings, ranks)
    recorder, batch = Recorder(policy), rollouts()
    reference = score(policy, batch, 0.7) - 0.1
    statistics = update(policy, recorder, batch, ADVANTAGES, ppo_loss, 0.7, reference, 0.05)
    gradient = recorder.gradient
    imitated = imitate(policy, recorder, batch, 0.1).numbers
    return gradient, statistics, recorder.gradient, imitated, {"score": reference}


def compare(got: Any, expected: Any, rtol: float) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            scale = value.abs().max() if isinstance(value, Tensor) else abs(value)
            torch.testing.assert_close(
                ours[name], value, rtol=rtol, atol=rtol * float(scale) + 1e-9, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(("layout", "row_tokens"), [("trees", 2048), ("trees", 40), ("packed", 64), ("padded", 100)])
def test_gradient_and_metrics_are_those_of_one_rank(tiny_folder, world, layout, row_tokens):
    expected = gradient_and_statistics(Ranks(), tiny_folder, rows_of(layout))
    assert 0 < expected[1]["clip_fraction"] < 1
    for result in on_ranks(world, gradient_and_statistics, tiny_folder, rows_of(layout, row_tokens)):
        compare(result, expected, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (4, in_float32(shard=2)),  # two replicas of two shards
        (2, in_float32(shard=1)),  # replicas only
        (2, in_float32(activation_checkpointing=True)),
        (1, in_float32(activation_checkpointing=True)),
    ],
)
def test_hybrid_sharding_and_activation_checkpointing_change_no_number(tiny_folder, world, settings):
    expected = gradient_and_statistics(Ranks(), tiny_folder, in_float32())
    for result in on_ranks(world, gradient_and_statistics, tiny_folder, replace(settings, row_tokens=60)):
        compare(result, expected, rtol=1e-5)


@pytest.mark.gpu
def test_a_tied_head_and_an_untied_one(folder_of):
    for name in ("llama", "gpt_neox", "qwen3_moe"):
        expected = gradient_and_statistics(Ranks(), folder_of(name), in_float32())
        for result in on_ranks(3, gradient_and_statistics, folder_of(name), rows_of(row_tokens=80)):
            compare(result, expected, rtol=3e-5)


@pytest.mark.gpu
def test_more_ranks_than_rollouts(tiny_folder):
    expected = few(Ranks(), tiny_folder)
    for result in on_ranks(4, few, tiny_folder):
        compare(result, expected, rtol=1e-5)


def few(ranks: Ranks, folder: Path) -> tuple[dict, dict]:
    policy = Policy.load(folder, DEVICE, in_float32(), ranks)
    recorder = Recorder(policy)
    statistics = update(policy, recorder, rollouts(1, 1), [1.0], ppo_loss, 1.0)
    return recorder.gradient, statistics


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [Precision.bfloat16, Precision.float16])
@pytest.mark.parametrize("world", [1, 2])
def test_half_precision_computes_on_float32_parameters(tiny_folder, dtype, world):
    expected = gradient_and_statistics(Ranks(), tiny_folder, in_float32())
    for result in on_ranks(world, gradient_and_statistics, tiny_folder, in_float32(dtype=dtype)):
        assert all(g.dtype == torch.float32 for g in result[0].values())
        for (name, ours), theirs in zip(result[2].items(), expected[2].values(), strict=True):
            assert (ours - theirs).norm() / theirs.norm() < (0.15 if dtype == Precision.bfloat16 else 0.03), name
        assert result[3]["loss"] == pytest.approx(expected[3]["loss"], rel=0.02)


def test_groups_of_ranks_must_be_equal(tiny_folder):
    with pytest.raises(
        ModelError, match=r"policy.shard=3 does not divide the 4 ranks into equal groups; possible are 1, 2, 4"
    ):
        Policy.load(tiny_folder, DEVICE, in_float32(shard=3), Ranks(0, 4))


def small_gradient(ranks: Ranks, folder: Path, dtype: Precision, scale: float) -> dict[str, Tensor]:
    policy = Policy.load(folder, DEVICE, in_float32(dtype=dtype), ranks)
    recorder = Recorder(policy, scale)
    update(policy, recorder, rollouts(), [1e-4 * a for a in ADVANTAGES], ppo_loss, 1.0)
    return {name: gradient / scale for name, gradient in recorder.gradient.items()}


@pytest.mark.gpu
def test_the_loss_scale_saves_gradients_that_float16_cannot_hold(tiny_folder):
    exact = small_gradient(Ranks(), tiny_folder, Precision.float32, 1.0)
    off = {}
    for scale in (1.0, 2.0**12):
        (gradient,) = on_ranks(1, small_gradient, tiny_folder, Precision.float16, scale)
        off[scale] = max(float((gradient[n] - exact[n]).norm() / exact[n].norm()) for n in exact)
    assert off[2.0**12] < 0.03
    assert off[1.0] > 5 * off[2.0**12]


# ---- one turn after the other ----------------------------------------------------------------------------------------


def sample(policy: Policy, engine: LocalEngine) -> list[tuple[list[int], list[float]]]:
    out = {
        c.id: c
        for c in engine.generate([Request(i, [5, 9, 11 + i // 4], seed=i) for i in range(8)], Sampling(max_tokens=12))
    }
    return [(out[i].token_ids, out[i].logprobs) for i in sorted(out)]


def train_and_sample(ranks: Ranks, folder: Path, settings: PolicyConfig, steps: int) -> dict:
    """Turns of sampling and training; what was sampled in each, what lay in memory, and the weights at the end."""
    policy = Policy.load(folder, DEVICE, settings, ranks)
    engine = LocalEngine(policy.sampler, policy.end_ids(), 8, 64, policy.device, policy.dtype)
    optimizer = Optimizer(
        policy.trainable, OptimizerConfig(lr=3e-3), steps, 3, offload=settings.offload != Offload.none
    )
    turns, bytes_ = [], []

    def held() -> int:
        owned = [local(t).untyped_storage() for t in (*policy.parameters.values(), *optimizer.tensors().values())]
        return sum({storage.data_ptr(): storage.size() for storage in owned}.values())

    for version in range(steps):
        hand_over(policy, engine, version, optimizer, verify=True)
        turns.append(sample(policy, engine))
        bytes_.append(held())
        freed = take_back(policy, engine, optimizer)
        bytes_.append((held(), freed))
        batch = rollouts(seed=version)
        update(policy, optimizer, batch, ADVANTAGES, ppo_loss, 1.0)
    weights = {name: t.clone() for bucket in policy.buckets(torch.float32, 2**20) for name, t in bucket.items()}
    return {"turns": turns, "bytes": bytes_, "weights": weights}


@pytest.mark.gpu
@pytest.mark.parametrize("offload", list(Offload))
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_sample_from_what_they_train(tiny_folder, world, offload):
    """Parameters are unsharded in place for the engine and given back; what waits on the host comes back bit for bit."""
    expected = train_and_sample(Ranks(), tiny_folder, in_float32(), 4)
    assert expected["turns"][0] != expected["turns"][1]
    for result in on_ranks(world, train_and_sample, tiny_folder, in_float32(offload=offload), 4):
        for ours, theirs in zip(result["turns"], expected["turns"], strict=True):
            assert [ids for ids, _ in ours] == [ids for ids, _ in theirs]
        compare(
            [result["weights"]], [expected["weights"]], rtol=1e-3
        )  # Adam divides by the gradient's size, however small
        parameters = sum(t.numel() for t in result["weights"].values()) * 4
        sampling, (training, freed) = result["bytes"][4:6]
        if offload == Offload.none:
            assert sampling == training
        elif offload == Offload.all and world > 1:
            assert sampling < 1000
        else:  # on one rank the engine samples from the parameters themselves
            assert sampling < 0.36 * training
        assert freed >= parameters if world > 1 else freed > 0


@pytest.mark.gpu
def test_a_rank_holds_its_share_and_no_more(tiny_folder):
    one, four = (
        train_and_sample(Ranks(), tiny_folder, in_float32(), 2),
        on_ranks(4, train_and_sample, tiny_folder, in_float32(), 2),
    )
    assert all(result["bytes"][-1][0] < 0.27 * one["bytes"][-1][0] for result in four)


# ---- dividing a batch ------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 30), st.lists(st.integers(0, 60), min_size=1, max_size=6)), min_size=1, max_size=6
    ),
    world=st.integers(1, 5),
    layout=st.sampled_from(["trees", "packed", "padded"]),
)
def test_all_ranks_together_hold_every_token_once(sizes, world, layout):
    batch = []
    for group, (prompt, completions) in enumerate(sizes):
        for index, n in enumerate(completions):
            batch.append(Rollout(f"t{group}", group, index, 0, [group + 1] * prompt))
            batch[-1].add_sampled(list(range(n)), [0.0] * n, [(0, n)])
    parts = share_out(batch, layout, world)
    assert sorted(i for part in parts for i in part) == list(range(len(batch)))
    rows = [pack(batch, layout, 100, Ranks(rank, world)) for rank in range(world)]
    assert len({len(own) for own in rows}) == 1
    tokens = torch.cat([row.token_index for own in rows for row in own])
    assert sorted(tokens.tolist()) == list(range(sum(r.sampled for r in batch)))
    longest, total = max(len(r.token_ids) for r in batch), sum(len(r.token_ids) for r in batch)
    assert all(abs(sum(len(batch[i].token_ids) for i in part) - total / world) <= longest for part in parts)


# ---- the model leaves ------------------------------------------------------------------------------------------------


def exported(ranks: Ranks, source: Path, folder: Path) -> None:
    Policy.load(source, DEVICE, in_float32(), ranks).export(folder)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_exported_is_what_was_loaded(any_folder, tmp_path, world):
    """Any architecture, plain or sharded: the same file names, the same tensors, the same tokenizer."""
    on_ranks(world, exported, any_folder, tmp_path / "out")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", any_folder))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ):
        assert (tmp_path / "out" / name).exists() == (any_folder / name).exists()
