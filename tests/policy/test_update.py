"""The update against an independent float64 computation, and its indifference to rows, layouts and silence."""

import copy
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_rl.algo.ppo_clip import loss as ppo_loss
from hybrid_rl.config import LayoutKind, OptimizerConfig, Schedule
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.numbers import Fault
from hybrid_rl.policy.optimizer import Optimizer, TrainingDiverged
from hybrid_rl.policy.update import imitate
from hybrid_rl.types import Rollout
from tests.device import DEVICE
from tests.updates import rows_of, update

TEMPERATURE = 0.7


def rollouts(seed: int = 0) -> list[Rollout]:
    """Two groups of three with different lengths; recorded log-probabilities far enough off that some ratios clip."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for group in range(2):
        prompt = torch.randint(3, 60, (4 + group,), generator=generator).tolist()
        for index in range(3):
            r = Rollout(f"t{group}", group, index, 0, list(prompt))
            n = int(torch.randint(1, 9, (), generator=generator))
            ids = torch.randint(3, 60, (n,), generator=generator).tolist()
            r.add_sampled(ids, (-6 * torch.rand(n, generator=generator)).tolist(), [(0, n)])
            made.append(r)
    return made


ADVANTAGES = [0.5, -0.25, -0.25, 1.0, 0.0, -1.0]


def reference_gradient(policy, batch: list[Rollout]) -> dict[str, torch.Tensor]:
    """Textbook GRPO in float64: plain attention on each sample alone, full logits, a python loop over tokens."""
    model = AutoModelForCausalLM.from_pretrained(
        policy.model.config._name_or_path, dtype=torch.float64, attn_implementation="eager"
    )
    model.load_state_dict({k: v.double() for k, v in policy.model.state_dict().items()})
    total, count = torch.zeros((), dtype=torch.float64), 0
    for r, advantage in zip(batch, ADVANTAGES, strict=True):
        logprobs = torch.log_softmax(model(torch.tensor([r.token_ids])).logits[0] / TEMPERATURE, -1)
        for t, sampled in enumerate(r.loss_mask):
            if sampled:
                ratio = torch.exp(logprobs[t - 1, r.token_ids[t]] - r.logprobs[t])
                clipped = min(max(ratio, torch.tensor(0.8)), torch.tensor(1.2))
                total = total - torch.minimum(ratio * advantage, clipped * advantage)
                count += 1
    (total / count).backward()
    return {name: p.grad for name, p in model.named_parameters()}


class Recorder:
    """Stands where the optimizer does, and keeps the gradient instead of using it."""

    scale = 1.0

    def __init__(self, model):
        self.model = model

    def learning_rate(self):
        return 0.0

    def step(self):
        self.gradient = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        self.model.zero_grad()
        return Optimizer({"p": torch.nn.Parameter(torch.zeros(1))}, OptimizerConfig(), 1, 1).step()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["padded", "packed", "trees"])
@pytest.mark.parametrize("row_tokens", [2048, 40, 16])
def test_gradient_equals_the_float64_textbook_in_every_layout_and_split(tiny_folder, layout, row_tokens):
    batch, policy = rollouts(), Policy.load(tiny_folder, DEVICE, rows_of(layout, row_tokens))
    recorder = Recorder(policy.model)
    stats = update(policy, recorder, batch, ADVANTAGES, ppo_loss, TEMPERATURE)
    assert 0 < stats["clip_fraction"] < 1  # both branches of the loss are in play
    for name, expected in reference_gradient(policy, batch).items():
        torch.testing.assert_close(recorder.gradient[name].double().cpu(), expected, rtol=2e-4, atol=2e-6, msg=name)


@pytest.mark.gpu
def test_one_step_moves_every_parameter_once(policy):
    before = copy.deepcopy(policy.model.state_dict())
    optimizer = Optimizer(policy.trainable, OptimizerConfig(lr=1e-3), 10, 3)
    update(policy, optimizer, rollouts(), ADVANTAGES, ppo_loss, 1.0)
    assert optimizer.steps == 1
    for name, tensor in policy.model.named_parameters():
        moved = (tensor - before[name]).abs().max().item()
        assert 0 < moved <= 1.01e-3  # Adam's first step is lr in size


@pytest.mark.gpu
def test_statistics_at_unchanged_weights(policy):
    """Recorded log-probabilities that are the policy's own: ratio 1, no clipping, no mismatch, loss −mean advantage."""
    batch = rollouts()
    for r in batch:
        with torch.no_grad():
            reference = AutoModelForCausalLM.from_pretrained(
                policy.model.config._name_or_path, attn_implementation="eager"
            )
            reference.load_state_dict(policy.model.state_dict())
            logprobs = torch.log_softmax(reference(torch.tensor([r.token_ids])).logits[0], -1)
        found = [float(logprobs[t - 1, r.token_ids[t]]) if m else 0.0 for t, m in enumerate(r.loss_mask)]
        r.logprobs = np.array(found, np.float32)
    stats = update(policy, Recorder(policy.model), batch, ADVANTAGES, ppo_loss, 1.0)
    assert stats["clip_fraction"] == 0
    assert 0 <= stats["mismatch_kl"] < 1e-10
    tokens = [r.sampled for r in batch]
    expected = -sum(a * n for a, n in zip(ADVANTAGES, tokens, strict=True)) / sum(tokens)
    assert stats["loss"] == pytest.approx(expected, abs=1e-5)
    assert 0 < stats["entropy"] < math.log(policy.model.config.vocab_size)


@pytest.mark.gpu
def test_imitate_is_the_mean_negative_log_likelihood_of_the_answers(policy):
    batch = rollouts()
    total, count = 0.0, 0
    with torch.no_grad():
        reference = AutoModelForCausalLM.from_pretrained(
            policy.model.config._name_or_path, dtype=torch.float64, attn_implementation="eager"
        )
        for r in batch:
            logprobs = torch.log_softmax(reference(torch.tensor([r.token_ids])).logits[0], -1)
            chosen = [float(logprobs[t - 1, r.token_ids[t]]) for t, m in enumerate(r.loss_mask) if m]
            total, count = total - sum(chosen), count + len(chosen)
    policy.settings.layout, policy.settings.row_tokens = LayoutKind.packed, 40
    stats = imitate(policy, Recorder(policy.model), batch, 0.0).numbers
    assert stats["loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.gpu
def test_a_batch_without_sampled_tokens_changes_nothing_and_stays_finite(policy):
    empty = [Rollout("t", 0, 0, 0, [5, 6, 7])]
    stats = update(policy, Recorder(policy.model), empty, [1.0], ppo_loss, 1.0)
    assert stats["loss"] == stats["entropy"] == 0.0


# ---- the optimizer ----------------------------------------------------------------------------------------------------


def one_parameter(**config) -> tuple[torch.nn.Parameter, Optimizer]:
    parameter = torch.nn.Parameter(torch.ones(3))
    return parameter, Optimizer({"p": parameter}, OptimizerConfig(**config), total_steps=10, max_bad_steps=3)


def test_a_millionth_still_moves_a_weight_of_one():
    """Float32 parameters and moments: in bfloat16 the weight would stay at 1.0."""
    parameter, optimizer = one_parameter(lr=1e-6)
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert torch.all(parameter < 1.0)
    assert all(t.dtype == torch.float32 for t in optimizer.tensors().values())


def test_gradients_are_clipped_to_the_norm():
    parameter, optimizer = one_parameter(lr=0.1, max_grad_norm=1.0)
    parameter.grad = torch.full((3,), 100.0)
    assert optimizer.step().grad_norm == pytest.approx(100 * math.sqrt(3))
    assert optimizer.adamw.state[parameter]["exp_avg"].norm() == pytest.approx(0.1, rel=1e-4)  # (1 − β₁) · clipped


def test_a_gradient_that_is_not_finite_is_skipped_counted_and_ends_the_run():
    parameter, optimizer = one_parameter(lr=0.1)
    for bad in (math.nan, math.inf):
        parameter.grad = torch.tensor([1.0, bad, 1.0])
        assert optimizer.step().skipped
        assert torch.equal(parameter.detach(), torch.ones(3))
    parameter.grad = torch.ones(3)
    assert not optimizer.step().skipped  # a good step starts the count again
    for _ in range(2):
        parameter.grad = torch.full((3,), math.nan)
        optimizer.step()
    optimizer.check(Fault("gradient"))
    parameter.grad = torch.full((3,), math.nan)
    fault = optimizer.step().fault
    assert fault is not None
    with pytest.raises(TrainingDiverged, match="3 steps in a row, the last: gradient of p is nan"):
        optimizer.check(fault)


def test_the_loss_scale_halves_at_an_overflow_and_doubles_after_many_good_steps():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = Optimizer({"p": parameter}, OptimizerConfig(lr=1e-3, max_grad_norm=1e9), 10_000, 3, scaled=True)
    assert optimizer.scale == 2.0**16
    for halvings in range(1, 6):  # more in a row than max_bad_steps: an overflow has its own remedy
        parameter.grad = torch.full((3,), math.inf)
        result = optimizer.step()
        assert (result.skipped, result.fault) == (True, None)
        assert optimizer.scale == 2.0 ** (16 - halvings)
    parameter.grad = torch.full((3,), 2.0 * optimizer.scale)
    assert optimizer.step().grad_norm == pytest.approx(2 * math.sqrt(3))  # of the loss itself
    for _ in range(399):
        parameter.grad = torch.ones(3)
        optimizer.step()
    assert optimizer.scale == 2.0**12
    saved, tensors = optimizer.state(), optimizer.tensors()
    other = Optimizer({"p": torch.nn.Parameter(torch.ones(3))}, OptimizerConfig(), 10_000, 3, scaled=True)
    other.restore(tensors, saved)
    assert other.state() == saved == {"steps": 405, "bad": 0, "scale": 2.0**12, "good": 400}
    optimizer.scale = 1.0  # nothing left to halve: now it is a bad step like any other
    for _ in range(2):
        parameter.grad = torch.full((3,), math.nan)
        optimizer.step()
    parameter.grad = torch.full((3,), math.nan)
    optimizer.step()
    with pytest.raises(TrainingDiverged):
        optimizer.check(Fault("gradient"))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule.constant, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        (Schedule.linear, [0.5, 1, *(1 - 0.9 * k / 7 for k in range(8))]),
        (Schedule.cosine, [0.5, 1, *(0.1 + 0.45 * (1 + math.cos(math.pi * k / 7)) for k in range(8))]),
    ],
)
def test_learning_rate_course(schedule, expected):
    parameter, optimizer = one_parameter(lr=1.0, warmup_steps=2, schedule=schedule, final_lr=0.1)
    course = []
    for _ in range(10):
        parameter.grad = torch.ones(3)
        course.append(optimizer.step().lr)
    assert course == pytest.approx(expected)


def test_weight_decay_pulls_matrices_and_leaves_vectors():
    """One step with a zero gradient: what moves is decay alone, w · (1 − lr · decay)."""
    named = {"matrix": torch.nn.Parameter(torch.ones(2, 3)), "norm": torch.nn.Parameter(torch.ones(3))}
    optimizer = Optimizer(named, OptimizerConfig(lr=0.1, weight_decay=0.5), total_steps=1, max_bad_steps=1)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(named["matrix"].detach(), torch.full((2, 3), 0.95))
    assert torch.equal(named["norm"].detach(), torch.ones(3))
