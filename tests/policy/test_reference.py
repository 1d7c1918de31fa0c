"""The reference model: a frozen copy or the policy's own base, its distance in the loss, on one rank and on several."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from hybrid_rl.algo.batch import Tokens
from hybrid_rl.algo.kl import k3
from hybrid_rl.algo.ppo_clip import loss as ppo_loss
from hybrid_rl.config import AlgoConfig, KlConfig, LoraConfig, Offload, OptimizerConfig, PolicyConfig, Precision
from hybrid_rl.config import Reference as Kind
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.optimizer import Optimizer
from hybrid_rl.policy.roles import Frozen, make_reference
from hybrid_rl.policy.sharding import local
from hybrid_rl.policy.update import score
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.report.charts import health_charts
from hybrid_rl.rl import train_rl
from hybrid_rl.run_folder.checkpoint import CheckpointError
from hybrid_rl.run_folder.reference import restore_reference, save_reference
from tests.policy.test_lora import every_rank, fill
from tests.policy.test_sharding import ADVANTAGES, Recorder, rollouts
from tests.ranks import on_ranks
from tests.test_rl import session
from tests.updates import rows_of, update

pytestmark = pytest.mark.slow  # each starts several ranks, or whole runs

CPU = torch.device("cpu")
LORA = LoraConfig(rank=3, alpha=6)


def made(policy: Policy, model_folder: Path, folder: Path, kind: Kind, start: int = 0) -> Frozen:
    """What make_reference gives a run in `folder`."""
    restore = partial(restore_reference, folder) if start else None
    reference = make_reference(policy, kind, model_folder, restore, partial(save_reference, folder, None))
    assert reference
    return reference


def moved(policy: Policy, steps: int = 2) -> None:
    """Away from where it is, by training."""
    optimizer = Optimizer(policy.trainable, OptimizerConfig(lr=1e-2), steps, 3)
    for seed in range(steps):
        update(policy, optimizer, rollouts(seed=seed), ADVANTAGES, ppo_loss)


def scored(reference: Frozen) -> Tensor:
    with reference.awake() as model:
        return score(model, rollouts(), 1.0)


def whole(policy: Policy) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in policy.parameters.items()
    }


def storages(policy: Policy) -> int:
    return sum({(s := local(p).untyped_storage()).data_ptr(): s.size() for p in policy.parameters.values()}.values())


# ---- a frozen copy ---------------------------------------------------------------------------------------------------


def freeze(ranks: Ranks, model_folder: Path, folder: Path, settings: PolicyConfig) -> dict[str, Any]:
    """A copy of a policy that was trained before; then both again, after the policy has gone on."""
    torch.manual_seed(0)
    policy = Policy.load(model_folder, CPU, settings, ranks)
    moved(policy)  # as SFT does
    begin, found = whole(policy), {}
    reference = made(policy, model_folder, folder, Kind.frozen)
    found["idle bytes"] = storages(reference.model)
    found["equal at first"] = torch.equal(scored(reference), score(policy, rollouts(), 1.0))
    recorder, distant = Recorder(policy), scored(reference)
    gradients = []
    for arguments in ((), (distant, 0.5)):
        found["statistics"] = update(policy, recorder, rollouts(), ADVANTAGES, ppo_loss, 1.0, *arguments)
        gradients.append(recorder.gradient)
    found["gradient unchanged"] = all(torch.equal(g, gradients[1][name]) for name, g in gradients[0].items())
    moved(policy)
    found["policy moved"] = not torch.equal(score(policy, rollouts(), 1.0), distant)
    found["scores stay"] = torch.equal(scored(reference), distant)
    resumed = made(policy, model_folder, folder, Kind.frozen, start=2)
    found["resumed"] = torch.equal(scored(resumed), distant)
    for copy in (reference, resumed):
        with copy.awake() as model:
            found["weights stay"] = found.get("weights stay", True) and all(
                torch.equal(p, begin[n]) for n, p in whole(model).items()
            )
        found["free"] = not any(p.requires_grad for p in copy.model.parameters.values())
    found["idle again"] = storages(reference.model)
    return found


@pytest.mark.parametrize("lora", [LoraConfig(), LORA], ids=["all weights", "adapters"])
@pytest.mark.parametrize(
    ("world", "offload"), [(1, Offload.none), (1, Offload.all), (2, Offload.all), (3, Offload.none)]
)
def test_a_frozen_copy_is_the_policy_as_rl_began(tiny_folder, tmp_path, world, offload, lora):
    settings = rows_of(row_tokens=100, offload=offload, lora=lora, activation_checkpointing=world == 2)
    for found in every_rank(world, freeze, tiny_folder, tmp_path, settings):
        for what in (
            "equal at first",
            "gradient unchanged",
            "policy moved",
            "scores stay",
            "weights stay",
            "resumed",
            "free",
        ):
            assert found[what], what
        assert found["statistics"]["reference_kl"] == 0.0
        assert (found["idle bytes"] == 0) == (found["idle again"] == 0) == (offload == Offload.all and world > 1)


def test_a_frozen_copy_in_half_precision(tiny_folder, tmp_path):
    for found in on_ranks(
        2, freeze, tiny_folder, tmp_path, rows_of(row_tokens=100, dtype=Precision.bfloat16, lora=LORA)
    ):
        assert found["equal at first"] and found["scores stay"] and found["resumed"]  # noqa: PT018
        assert found["statistics"]["reference_kl"] == 0.0


def resume(ranks: Ranks, model_folder: Path, folder: Path) -> Tensor:
    return scored(
        made(Policy.load(model_folder, CPU, rows_of(row_tokens=100), ranks), model_folder, folder, Kind.frozen, start=2)
    )


def test_a_run_resumed_on_other_ranks_finds_its_reference(tiny_folder, tmp_path):
    policy = Policy.load(tiny_folder, CPU)
    moved(policy)
    expected = scored(made(policy, tiny_folder, tmp_path, Kind.frozen))
    for result in on_ranks(3, resume, tiny_folder, tmp_path):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def lost(ranks: Ranks, model_folder: Path, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        resume(ranks, model_folder, folder)
    return str(caught.value)


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_whose_reference_is_gone_says_so(tiny_folder, tmp_path, world):
    assert all(
        "checkpoints/reference holds no complete reference" in m for m in every_rank(world, lost, tiny_folder, tmp_path)
    )


# ---- the base --------------------------------------------------------------------------------------------------------


def without_adapters(ranks: Ranks, model_folder: Path, folder: Path, settings: PolicyConfig) -> dict[str, Any]:
    plain = Policy.load(model_folder, CPU, rows_of(row_tokens=100, dtype=settings.dtype), ranks)
    expected = score(plain, rollouts(), 1.0)
    policy = Policy.load(model_folder, CPU, settings, ranks)
    fill(policy)
    reference = made(policy, model_folder, folder, Kind.base)
    before, own = whole(policy), score(policy, rollouts(), 1.0)
    flags = {name: p.requires_grad for name, p in policy.model.named_parameters()}
    gradients = []
    for _ in range(2):  # before and after the adapters were off
        recorder = Recorder(policy)
        update(policy, recorder, rollouts(), ADVANTAGES, ppo_loss)
        gradients.append(recorder.gradient)
        distant = scored(reference)
    return {
        "is the base": torch.equal(distant, expected),
        "differs from the policy": (own - distant).abs().max() > 0.1,
        "adapters are on again": torch.equal(score(policy, rollouts(), 1.0), own),
        "weights stay": all(torch.equal(w, before[name]) for name, w in whole(policy).items()),
        "flags stay": flags == {name: p.requires_grad for name, p in policy.model.named_parameters()} and 0 < sum(flags.values()) < len(flags),
        "trains as before": gradients[0].keys() == gradients[1].keys() and all(torch.equal(g, gradients[1][n]) for n, g in gradients[0].items()),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [Precision.float32, Precision.bfloat16])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_base_is_the_policy_with_its_adapters_off(tiny_folder, tmp_path, world, dtype):
    run = on_ranks if dtype == Precision.bfloat16 else every_rank  # half precision is FSDP's, also on one rank
    for found in run(world, without_adapters, tiny_folder, tmp_path, rows_of(row_tokens=100, lora=LORA, dtype=dtype)):
        for what, so in found.items():
            assert so, what


def sharded_after(ranks: Ranks, model_folder: Path) -> bool:
    policy = Policy.load(model_folder, CPU, rows_of(row_tokens=100), ranks)
    score(policy, rollouts(), 1.0)
    return all(isinstance(p, DTensor) for p in policy.model.parameters())


def test_scoring_leaves_no_parameters_whole(tiny_folder):
    assert all(on_ranks(2, sharded_after, tiny_folder))


# ---- the distance ----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(-40, 0), st.floats(-40, 0)), min_size=1, max_size=20))
def test_k3_is_its_definition(pairs):
    ours, theirs = torch.tensor(pairs).unbind(-1)
    d = [min(20.0, max(-20.0, float(b) - float(a))) for a, b in zip(ours, theirs, strict=True)]
    for value, x in zip(k3(ours, theirs).tolist(), d, strict=True):
        assert value == pytest.approx(math.expm1(x) - x, rel=1e-3, abs=1e-9)
        assert value >= 0


def test_k3_by_hand():
    assert k3(torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([-1.0, -1.0, -2.0])).tolist() == pytest.approx(
        [0, math.e - 2, 1 / math.e]
    )
    assert k3(torch.tensor([-90.0]), torch.tensor([0.0])).item() == pytest.approx(math.exp(20) - 21)
    assert k3(torch.tensor([0.0]), torch.tensor([-90.0])).item() == pytest.approx(19)


def test_the_mean_of_k3_is_the_divergence():
    ours, theirs = torch.randn(2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(-1)
    assert (ours.exp() * k3(ours, theirs)).sum() == pytest.approx(float((ours.exp() * (ours - theirs)).sum()))


def with_distance(ranks: Ranks, folder: Path, distant: Tensor, coefficient: float) -> tuple[dict, dict]:
    policy = Policy.load(folder, CPU, rows_of(row_tokens=60), ranks)
    recorder = Recorder(policy)
    statistics = update(policy, recorder, rollouts(), ADVANTAGES, ppo_loss, 0.7, distant, coefficient)
    return recorder.gradient, statistics


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_gradient_of_loss_and_distance_is_the_textbooks(folder_of, tiny_folder, world):
    """Plain transformers in float64, one sample at a time; the reference is another model."""
    model, other = (
        AutoModelForCausalLM.from_pretrained(folder_of("qwen3", seed), dtype=torch.float64) for seed in (0, 1)
    )
    other.load_state_dict(
        {n: w + 0.1 * (other.state_dict()[n] - w) for n, w in model.state_dict().items()}
    )  # not too far away
    total, distance, distant = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), []
    for r, advantage in zip(rollouts(), ADVANTAGES, strict=True):
        sampled, ids = torch.tensor(r.loss_mask).bool()[1:], torch.tensor(r.token_ids)
        ours, theirs = (
            (m(ids[None]).logits[0, :-1] / 0.7).log_softmax(-1).gather(-1, ids[1:, None])[:, 0][sampled]
            for m in (model, other)
        )
        distant.append(theirs.detach())
        old = torch.tensor(r.logprobs, dtype=torch.float64)[1:][sampled]
        total = (
            total
            + ppo_loss(
                Tokens(ours, old, old, torch.full_like(old, advantage), torch.zeros(len(old), dtype=torch.int64), old)
            )[0].sum()
        )
        d = distant[-1] - ours
        distance = distance + (d.exp() - d - 1).sum()
    count = len(torch.cat(distant))
    ((total + 0.3 * distance) / count).backward()
    assert float(distance.detach()) / count > 0.05
    for gradient, statistics in every_rank(world, with_distance, tiny_folder, torch.cat(distant).float(), 0.3):
        assert statistics["reference_kl"] == pytest.approx(float(distance.detach()) / count, rel=1e-4)
        assert statistics["loss"] == pytest.approx(float((total + 0.3 * distance).detach()) / count, rel=1e-4)
        for name, p in model.named_parameters():
            torch.testing.assert_close(
                gradient[name].double(), p.grad, rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
            )


def test_without_a_coefficient_the_distance_is_only_reported(tiny_folder):
    distant = score(Policy.load(tiny_folder, CPU, rows_of(row_tokens=60)), rollouts(), 0.7) - 0.5
    recorded, statistics = with_distance(Ranks(), tiny_folder, distant, 0.0)
    alone = Recorder(Policy.load(tiny_folder, CPU, rows_of(row_tokens=60)))
    plain = update(alone.policy, alone, rollouts(), ADVANTAGES, ppo_loss, 0.7)
    assert all(torch.equal(g, recorded[name]) for name, g in alone.gradient.items())
    assert statistics["reference_kl"] == pytest.approx(math.exp(-0.5) - 0.5, rel=1e-3)
    assert statistics == {**plain, "reference_kl": statistics["reference_kl"]}


# ---- in the loop -----------------------------------------------------------------------------------------------------


def trained(policy: Policy, model_folder: Path, folder: Path, reward: str, algo: AlgoConfig) -> list[dict]:
    s = session(policy, folder, reward, steps=3)
    s.config.algo = algo
    try:
        train_rl(s)
    finally:
        s.scorer.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", list(Kind))
def test_metrics_line_and_chart(tiny_folder, tmp_path, capsys, kind):
    policy = Policy.load(tiny_folder, CPU, rows_of(row_tokens=100, lora=LORA))
    steps = trained(
        policy,
        tiny_folder,
        tmp_path,
        "hash_of_answer",
        AlgoConfig(reference=kind, kl=KlConfig(coef=0.1 if kind != Kind.none else 0.0)),
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    there = kind != Kind.none
    assert all(("reference_kl" in step) == there for step in steps)
    assert all(("reference " in line) == there for line in lines)
    assert any(chart.title == "Reference KL" for chart in health_charts(steps)) == there
    if there:
        assert steps[0]["reference_kl"] == 0.0 < steps[2]["reference_kl"]
        assert "reference 0e+00" in lines[0]


@pytest.mark.parametrize("kind", list(Kind))
def test_a_step_without_a_signal(tiny_folder, tmp_path, kind):
    policy = Policy.load(tiny_folder, CPU, rows_of(row_tokens=100, lora=LORA, offload=Offload.all))
    steps = trained(policy, tiny_folder, tmp_path, "constant", AlgoConfig(reference=kind))
    assert [step["grad_norm"] for step in steps] == [None] * 3
    assert all(step.get("reference_kl", 0.0) == (0.0 if kind == Kind.none else None) for step in steps)
