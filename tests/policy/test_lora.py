"""LoRA adapters: what is trained, what the engine samples from, and what is left on the disk, on one rank and on several."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from hybrid_rl.algo.batch import Tokens
from hybrid_rl.algo.ppo_clip import loss as ppo_loss
from hybrid_rl.attention.attend import ATTENTION_NAME
from hybrid_rl.config import LoraConfig, Offload, OptimizerConfig, PolicyConfig, Precision
from hybrid_rl.engine.base import Request, Sampling
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.handover import HandoverError, hand_over, take_back
from hybrid_rl.model_folder.read import ModelError
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.optimizer import Optimizer
from hybrid_rl.policy.sharding import local
from hybrid_rl.policy.update import score
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.run_folder import checkpoint
from hybrid_rl.types import Rollout
from tests.policy.test_sharding import ADVANTAGES, Recorder, rollouts, sample
from tests.ranks import on_ranks
from tests.test_run import kill_when, metrics, run, run_folder, same, start
from tests.updates import update

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LORA = LoraConfig(rank=3, alpha=6)
SCALE = 6 / 3
TEMPERATURE = 0.7
settings = partial(PolicyConfig, lora=LORA)


def every_rank(world: int, function, *arguments) -> list:
    """One rank without a process group, as a run has it, or several with one."""
    return [function(Ranks(), *arguments)] if world == 1 else on_ranks(world, function, *arguments)


@torch.no_grad()
def fill(policy: Policy, seed: int = 0) -> dict[str, Tensor]:
    """Give every adapter numbers that depend on its name's place alone; returns them whole."""
    generator = torch.Generator().manual_seed(seed)
    made = {name: 0.2 * torch.randn(p.shape, generator=generator) for name, p in policy.trainable.items()}
    for name, whole in made.items():
        p = policy.trainable[name]
        p.copy_(distribute_tensor(whole, p.device_mesh, p.placements) if isinstance(p, DTensor) else whole)
    return made


def with_products(weights: dict[str, Tensor], adapters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The definition, in float64: W + (α / r) · B A where there is an adapter."""
    weights = {name: w.detach().double() for name, w in weights.items()}
    for name in [name for name in adapters if ".lora_A." in name]:
        plain = name.replace(".lora_A.default", "")
        weights[plain] = weights[plain] + SCALE * adapters[name.replace("lora_A", "lora_B")] @ adapters[name]
    return weights


def textbook(folder: Path, adapters: dict[str, Tensor], batch: list[Rollout]) -> dict[str, Tensor]:
    """The adapters' gradient by plain transformers in float64, one sample at a time."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    adapters = {name: a.double().requires_grad_() for name, a in adapters.items()}
    weights, total = with_products(dict(model.named_parameters()), adapters), torch.zeros((), dtype=torch.float64)
    for r, advantage in zip(batch, ADVANTAGES, strict=True):
        sampled = torch.tensor(r.loss_mask).bool()[1:]
        logits = (
            functional_call(model, weights, kwargs={"input_ids": torch.tensor([r.token_ids])}).logits[0, :-1][sampled]
            / TEMPERATURE
        )
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(r.token_ids)[1:][sampled][:, None])[:, 0]
        old = torch.tensor(r.logprobs, dtype=torch.float64)[1:][sampled]
        total = (
            total
            + ppo_loss(
                Tokens(
                    logprobs, old, old, torch.full_like(old, advantage), torch.zeros(len(old), dtype=torch.int64), old
                )
            )[0].sum()
        )
    (total / sum(r.sampled for r in batch)).backward()
    return {name: a.grad for name, a in adapters.items()}


# ---- training --------------------------------------------------------------------------------------------------------


def gradient(ranks: Ranks, folder: Path, settings: PolicyConfig) -> dict[str, Tensor]:
    policy = Policy.load(folder, CPU, settings, ranks)
    fill(policy)
    recorder = Recorder(policy)
    update(policy, recorder, rollouts(), ADVANTAGES, ppo_loss, TEMPERATURE)
    return recorder.gradient


def adapters_of(folder: Path, lora: LoraConfig = LORA) -> dict[str, Tensor]:
    return fill(Policy.load(folder, CPU, PolicyConfig(lora=lora)))


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize(("world", "checkpointing"), [(1, False), (2, False), (3, False), (1, True), (2, True)])
def test_only_adapters_have_a_gradient_and_it_is_the_textbooks(folder_of, name, world, checkpointing):
    expected = textbook(folder_of(name), adapters_of(folder_of(name)), rollouts())
    assert len(expected) == 2 * 2 * 7  # A and B, two layers, seven matrices
    how = settings(activation_checkpointing=checkpointing)
    for result in every_rank(world, gradient, folder_of(name), how if world == 1 else replace(how, row_tokens=60)):
        assert result.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(
                result[key].double(), value, rtol=3e-4, atol=3e-6, msg=lambda m, key=key: f"{key}: {m}"
            )


@pytest.mark.parametrize("name", ["phi3", "gpt_neox", "granite", "gemma", "qwen3_moe"])
def test_other_architectures(folder_of, name):
    """A mixture's experts are one fused parameter and its router is no linear module: its attention alone gets adapters."""
    expected = textbook(folder_of(name), adapters_of(folder_of(name)), rollouts())
    if name == "qwen3_moe":
        assert {key.split(".")[4] for key in expected} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    result = gradient(Ranks(), folder_of(name), settings())
    assert result.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(
            result[key].double(), value, rtol=1e-3, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize("world", [1, 2])
def test_half_precision_computes_on_float32_adapters(tiny_folder, world):
    expected = gradient(Ranks(), tiny_folder, settings())
    for result in on_ranks(world, gradient, tiny_folder, settings(dtype=Precision.bfloat16)):
        assert all(g.dtype == torch.float32 for g in result.values())
        ours, theirs = (torch.cat([g[name].flatten() for name in expected]) for g in (result, expected))
        assert torch.cosine_similarity(ours, theirs, dim=0) > 0.95


def trained(policy: Policy, optimizer: Optimizer, steps: int) -> None:
    for seed in range(steps):
        update(policy, optimizer, rollouts(seed=seed), ADVANTAGES, ppo_loss, 1.0)


def train(ranks: Ranks, folder: Path, how: PolicyConfig, root: Path) -> dict:
    torch.manual_seed(0)
    policy = Policy.load(folder, CPU, how, ranks)
    before = {name: local(p).detach().clone() for name, p in policy.parameters.items()}
    optimizer = Optimizer(policy.trainable, OptimizerConfig(lr=1e-2), 3, 3)
    trained(policy, optimizer, 3)
    checkpoint.save(root, "rl", 3, policy, optimizer, {}, keep=1)
    moved = {name for name, p in policy.parameters.items() if not torch.equal(local(p), before[name])}
    return {
        "moved": moved,
        "rows": {name: local(p).numel() for name, p in policy.parameters.items()},
        "moments": set(optimizer.tensors()),
    }


@pytest.mark.parametrize("world", [1, 2, 3])
def test_base_weights_stay_and_only_adapters_are_kept(tiny_folder, tmp_path, world):
    names = adapters_of(tiny_folder).keys()
    assert all(".lora_" in name for name in names)
    for result in every_rank(world, train, tiny_folder, settings(), tmp_path):
        assert result["moved"] == {
            name for name in names if result["rows"][name]
        }  # a rank may hold no row of a small A
        assert result["moments"] == {f"{name}.{kind}" for name in names for kind in ("exp_avg", "exp_avg_sq", "step")}
    for part in ("policy", "optimizer"):
        files = list((tmp_path / "rl_000003").glob(f"{part}*.safetensors"))
        kept = {key for file in files for key in safe_open(file, "pt").keys()}  # noqa: SIM118
        assert kept == (set(names) if part == "policy" else result["moments"])


# ---- which matrices --------------------------------------------------------------------------------------------------


def test_targets_are_names_or_the_ends_of_names(tiny_folder):
    adapters = adapters_of(tiny_folder, LoraConfig(rank=2, targets=["q_proj", "layers.1.mlp.up_proj"]))
    layers = {name.split(".lora_")[0] for name in adapters}
    assert layers == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }


def refused(ranks: Ranks, folder: Path, targets: list[str]) -> str:
    with pytest.raises(ModelError) as caught:
        Policy.load(folder, CPU, PolicyConfig(lora=LoraConfig(rank=2, targets=targets)), ranks)
    return str(caught.value)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (
            ["q_porj"],
            "policy.lora.targets: q_porj names no linear module of Qwen3ForCausalLM below its head; the nearest are q_proj, ",
        ),
        (["q_proj", "dense"], "policy.lora.targets: dense names no"),  # part of a list
        (["proj"], "proj names no"),  # the end of a word is not the end of a name
        (["lm_head"], "lm_head names no"),
        (["embed_tokens"], "embed_tokens names no"),
        (["q_proj", "all-linear"], "all-linear names no"),
    ],
)
def test_a_target_that_names_nothing_is_refused(tiny_folder, targets, expected):
    message = refused(Ranks(), tiny_folder, targets)
    assert expected in message
    assert "\n" not in message


def test_it_is_refused_on_every_rank(tiny_folder):
    assert all("dense names no" in message for message in on_ranks(2, refused, tiny_folder, ["dense"]))


# ---- what the engine samples from ------------------------------------------------------------------------------------


def stranger(folder: Path, dtype: torch.dtype) -> LocalEngine:
    """An engine with memory of its own, on a plain model that never heard of adapters."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION_NAME).eval()
    return LocalEngine(model, frozenset([257]), 8, 64, CPU, dtype)


def as_rollouts(samples: list[tuple[list[int], list[float]]]) -> list[Rollout]:
    made = [Rollout("t", i // 4, i, 0, [5, 9, 11 + i // 4]) for i in range(len(samples))]
    for r, (ids, logprobs) in zip(made, samples, strict=True):
        r.add_sampled(ids, logprobs, [(0, len(ids))])
    return made


def greedy(engine: LocalEngine) -> list[list[int]]:
    out = {
        c.id: c.token_ids
        for c in engine.generate([Request(i, [5, 9 + i], seed=i) for i in range(6)], Sampling(0.0, max_tokens=16))
    }
    return [out[i] for i in sorted(out)]


def sample_and_train(ranks: Ranks, folder: Path, other_folder: Path, how: PolicyConfig) -> dict:
    """Both engines before and after three steps: how far from the trainer's log-probabilities, and what they would say."""
    torch.manual_seed(0)
    policy = Policy.load(folder, CPU, how, ranks)
    embedded = LocalEngine(policy.sampler, policy.end_ids(), 8, 64, CPU, policy.dtype)
    own = stranger(other_folder, policy.dtype)
    optimizer = Optimizer(policy.trainable, OptimizerConfig(lr=1e-2), 3, 3, offload=how.offload != Offload.none)
    found: dict = {"samples": [], "off": [], "greedy": [], "names": list(own.weights())}
    for version in (0, 3):
        samples = {}
        for which, engine in (("embedded", embedded), ("own", own)):
            hand_over(policy, engine, version, optimizer, verify=True, bucket_bytes=20_000)
            samples[which] = sample(policy, engine)
            found["greedy"].append(greedy(engine))
            take_back(policy, engine, optimizer)
        found["samples"].append(samples)
        for which in samples:
            batch = as_rollouts(samples[which])
            recorded = torch.tensor([x for ids, logprobs in samples[which] for x in logprobs])
            found["off"].append(float((score(policy, batch, 1.0) - recorded).abs().max()))
        if version == 0:
            trained(policy, optimizer, 3)
    return found


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize(("world", "offload"), [(1, Offload.none), (2, Offload.all), (3, Offload.none)])
def test_both_kinds_of_engine_sample_from_the_trained_adapters(folder_of, name, world, offload):
    for result in every_rank(world, sample_and_train, folder_of(name), folder_of(name, 1), settings(offload=offload)):
        before, after = result["samples"]
        for which in ("embedded", "own"):
            assert before[which] != after[which]
        assert max(result["off"]) < 1e-4
        assert result["greedy"][0] == result["greedy"][1] != result["greedy"][2] == result["greedy"][3]


def test_the_engines_in_half_precision(tiny_folder, folder_of):
    for result in on_ranks(2, sample_and_train, tiny_folder, folder_of("qwen3", 1), settings(dtype=Precision.bfloat16)):
        assert result["samples"][0]["embedded"] != result["samples"][1]["embedded"]
        assert max(result["off"]) < 0.5  # bfloat16 has three digits, and these distributions are peaked


def handed_over_with_an_error(ranks: Ranks, folder: Path, embedded: bool, spot: int) -> str:
    policy = Policy.load(folder, CPU, settings(), ranks)
    fill(policy)
    engine = LocalEngine(policy.sampler, policy.end_ids(), 8, 64) if embedded else stranger(folder, torch.float32)
    done = "set_version" if embedded else "update_weights"
    finish = getattr(engine, done)

    def damaged(*arguments):
        finish(*arguments)
        if ranks.rank == ranks.world - 1:
            with torch.no_grad():
                list(engine.weights().values())[spot].view(-1)[7] += 1e-3

    setattr(engine, done, damaged)
    with pytest.raises(HandoverError) as caught:
        hand_over(policy, engine, 1, verify=True)
    return str(caught.value)


@pytest.mark.parametrize("spot", range(1, 8))
def test_verify_finds_a_single_wrong_value(tiny_folder, spot):
    assert "differs from the policy's" in handed_over_with_an_error(Ranks(), tiny_folder, False, spot)


@pytest.mark.parametrize("embedded", [True, False])
def test_verify_finds_it_on_every_rank(tiny_folder, embedded):
    messages = on_ranks(3, handed_over_with_an_error, tiny_folder, embedded, 2)
    assert len(set(messages)) == 1
    assert ("lora_A.default" if embedded else "q_proj") in messages[0] or "k_proj" in messages[0]


# ---- merging and export ----------------------------------------------------------------------------------------------


def merge(ranks: Ranks, folder: Path, size: int) -> dict[str, Tensor]:
    policy = Policy.load(folder, CPU, settings(), ranks)
    fill(policy)
    before = {name: local(p).detach().clone() for name, p in policy.parameters.items()}
    weights = {name: t.clone() for bucket in policy.buckets(torch.float32, size) for name, t in bucket.items()}
    assert all(torch.equal(local(p), before[name]) for name, p in policy.parameters.items())
    return weights


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2**30])
def test_merged_weights_are_the_definitions(folder_of, name, world, size):
    plain = AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.float64)
    expected = with_products(
        dict(plain.named_parameters()), {n: a.double() for n, a in adapters_of(folder_of(name)).items()}
    )
    for result in every_rank(world, merge, folder_of(name), size):
        assert result.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(
                result[key].double(), value, rtol=1e-6, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}"
            )


def export(ranks: Ranks, folder: Path, out: Path) -> Tensor:
    policy = Policy.load(folder, CPU, settings(), ranks)
    fill(policy)
    policy.export(out)
    return score(policy, rollouts(), 1.0)


@torch.no_grad()
def plain_logprobs(model: torch.nn.Module, batch: list[Rollout]) -> Tensor:
    found = []
    for r in batch:
        logprobs = model(input_ids=torch.tensor([r.token_ids])).logits[0, :-1].log_softmax(-1)
        taken = logprobs.gather(-1, torch.tensor(r.token_ids)[1:, None])[:, 0]
        found.append(taken[torch.tensor(r.loss_mask).bool()[1:]])
    return torch.cat(found)


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama", "qwen3_moe"])
@pytest.mark.parametrize("world", [1, 2])
def test_the_exported_model_and_the_exported_adapter_are_the_policy(folder_of, tmp_path, name, world):
    ours = every_rank(world, export, folder_of(name), tmp_path / "final")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    base = AutoModelForCausalLM.from_pretrained(folder_of(name))
    unadapted = plain_logprobs(base, rollouts())
    adapter = PeftModel.from_pretrained(base, tmp_path / "final_adapter")
    for logprobs in ours:
        assert (logprobs - unadapted).abs().max() > 0.1
        torch.testing.assert_close(plain_logprobs(merged, rollouts()), logprobs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(plain_logprobs(adapter, rollouts()), logprobs, rtol=1e-4, atol=1e-4)
    assert not [
        key for key in load_file(tmp_path / "final" / "model.safetensors") if "lora" in key or "base_layer" in key
    ]
    assert json.loads((tmp_path / "final_adapter" / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(folder_of(name))


# ---- a whole run -----------------------------------------------------------------------------------------------------

ADAPTED = [
    "policy.lora.rank=4",
    "sft.steps=10",
    "rl.steps=3",
    "rl.eval_every=0",
    "rl.checkpoint_every=1",
    "algo.reference=frozen",
    "algo.kl.coef=0.1",
    "algo.minibatches=1",
]


def test_a_killed_run_with_adapters_and_a_frozen_reference_goes_on_to_the_same_numbers(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    output = run(whole, *ADAPTED)
    assert "are trained (LoRA adapters of rank 4)" in output
    assert str(run_folder(whole).relative_to(whole) / "final_adapter") in output
    assert "reference 0e+00" in next(line for line in output.splitlines() if line.startswith("step 1/3"))
    kill_when(start(killed, *ADAPTED), "step 2/3")
    assert (run_folder(killed) / "checkpoints" / "reference").is_dir()
    assert "step 1/3" not in run(killed, *ADAPTED, "resume=auto")
    same(whole, killed)
    assert any((line.get("reference_kl") or 0) > 0 for line in metrics(whole))  # not every group was silent
    base = AutoModelForCausalLM.from_pretrained(run_folder(whole) / "base_model")
    adapter = PeftModel.from_pretrained(base, run_folder(whole) / "final_adapter").merge_and_unload()
    for name, tensor in load_file(run_folder(whole) / "final" / "model.safetensors").items():
        torch.testing.assert_close(adapter.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_run_on_two_ranks(tmp_path):
    output = run(tmp_path, *ADAPTED[:1], "algo.reference=base", "rl.steps=2", "device=cpu", "ranks=2")
    assert "2 ranks on cpu" in output
    lines = [json.loads(line) for line in (run_folder(tmp_path) / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["stage"] == "rl"]
    learned = [line for line in steps if line["grad_norm"]]  # some step's groups may all be silent
    assert learned
    assert all(
        line["mismatch_kl"] < 1e-6 < line["reference_kl"] for line in learned
    )  # SFT has moved the policy away from its base
    assert {"final", "final_adapter"} <= {p.name for p in run_folder(tmp_path).iterdir()}


def test_a_target_that_names_nothing_ends_a_run_in_one_line(tmp_path):
    output = run(tmp_path, "policy.lora.rank=4", "policy.lora.targets=[q_proj,dense]", code=1)
    assert "hybrid_rl: policy.lora.targets: dense names no linear module" in output
    assert "Traceback" not in output
