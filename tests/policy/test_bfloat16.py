"""Layouts in bfloat16: packed = padded = trees, and all of them float64, to the rounding of activations; gradients too.

On a GPU the fused kernels compute attention; make test-gpu runs these tests there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_rl.attention import kernels
from hybrid_rl.config import PolicyConfig, Precision
from hybrid_rl.policy.layout import pack, sampled_tokens
from hybrid_rl.policy.model import Policy
from hybrid_rl.types import Rollout
from tests.device import DEVICE, ON_GPU
from tests.policy.test_layout import LAYOUTS, mixed, plain

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["qwen3", "gemma3", "llama"])
def halved(request: pytest.FixtureRequest, folder_of) -> Iterator[Policy]:
    """A policy on one rank that computes in bfloat16, sharded as always in half precision."""
    yield Policy.load(folder_of(request.param), DEVICE, PolicyConfig(dtype=Precision.bfloat16))
    dist.destroy_process_group()


def run(policy: Policy, rollouts: list[Rollout], layout: str, row_tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
    """log π [N] of all sampled tokens, and the gradient of their weighted token mean by parameter, on the CPU."""
    weights = torch.linspace(-1, 1, len(sampled_tokens(rollouts)))
    logprobs = torch.full((len(weights),), math.nan)
    for row in pack(rollouts, layout, row_tokens):
        row_logprobs, _ = policy.logprobs(row.to(policy.device), 0.6)
        (weights[row.token_index].to(policy.device) * row_logprobs).sum().div(len(weights)).backward()
        logprobs[row.token_index] = row_logprobs.detach().cpu()
    gradient = {name: p.grad.full_tensor().cpu() for name, p in policy.parameters.items()}
    for p in policy.parameters.values():
        p.grad = None
    return logprobs, gradient


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The distance of two gradients, relative to the second."""
    difference = sum(float((ours[n] - t).square().sum()) for n, t in theirs.items())
    return math.sqrt(difference / sum(float(t.square().sum()) for t in theirs.values()))


def test_all_layouts_are_float64_to_rounding(halved: Policy, reference_of) -> None:
    rollouts, reference = mixed(), reference_of(halved.folder)
    expected = plain(reference.exact, rollouts)[0].double()
    exact = {name: p.grad.float() for name, p in reference.exact.named_parameters()}
    found = {(layout, n): run(halved, rollouts, layout, n) for layout in LAYOUTS for n in (2048, 40)}
    for logprobs, gradient in found.values():
        assert (logprobs.double() - expected).abs().mean() < 0.1
        assert (logprobs.double() - expected).abs().max() < 1.0
        assert apart(gradient, exact) < 0.1
    one = found["packed", 2048]
    for logprobs, gradient in found.values():
        assert (logprobs - one[0]).abs().mean() < 0.05
        assert apart(gradient, one[1]) < 0.05


def test_rows_of_one_token_and_rows_without_a_sampled_one(halved: Policy) -> None:
    """What a rank computes that has nothing to do, and the shortest sample there is."""
    for rollouts in ([Rollout("t", 0, 0, 0, [5])], mixed()[-3:]):
        for layout in LAYOUTS:
            for row in pack(rollouts, layout, 40):
                halved.logprobs(row.to(DEVICE), 1.0)[0].sum().backward()
    assert all(p.grad.full_tensor().isfinite().all() for p in halved.parameters.values())


def test_the_kernel_is_the_one_that_is_named(halved: Policy, monkeypatch) -> None:
    """On a GPU every layer of the three models goes through it, in both layouts."""
    (row,) = pack(mixed(), "packed", 2048)
    halved.logprobs(row.to(DEVICE), 1.0)  # kernels are tried at their first use
    calls, call = [], kernels.Kernel.__call__
    monkeypatch.setattr(kernels.Kernel, "__call__", lambda self, *given: calls.append(self.name) or call(self, *given))
    for layout in ("packed", "trees"):
        (row,) = pack(mixed(), layout, 2048)
        halved.logprobs(row.to(DEVICE), 1.0)
    name, layers = kernels.chosen_name(DEVICE, torch.bfloat16), halved.config.num_hidden_layers
    assert calls == [name] * 2 * layers if ON_GPU else name == kernels.WITHOUT and not calls
