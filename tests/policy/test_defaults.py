"""What is chosen for a device: GPUs of several sizes stand in, as no test machine has them."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config

from hybrid_rl.attention import kernels
from hybrid_rl.config import Config, LayoutKind, PolicyConfig, Precision
from hybrid_rl.policy import defaults
from hybrid_rl.policy.defaults import described, logit_elements, row_tokens, settled
from hybrid_rl.policy.model import Policy
from hybrid_rl.preflight.budget import Sizes, memory_by_phase
from hybrid_rl.processes.ranks import Ranks

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB = 2**30
SHAPES = {
    "0.6B": Qwen3Config(num_hidden_layers=28, hidden_size=1024, vocab_size=151_936),
    "4B": Qwen3Config(num_hidden_layers=36, hidden_size=2560, vocab_size=151_936),
    "8B": Qwen3Config(num_hidden_layers=36, hidden_size=4096, vocab_size=151_936),
}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch):
    """Choose the GPU's memory in GiB."""
    return lambda gib: monkeypatch.setattr(
        defaults, "gpu_bytes", lambda device: gib * GIB if device.type == "cuda" else 0
    )


@pytest.mark.parametrize(
    ("gib", "shape", "checkpointing", "tokens"),
    [
        # a token of the 0.6B shape has 34 · 28 · 1024 · 2 bytes of activations = 1.86 MiB, 16,384 of them 29.75 GiB
        (140, "0.6B", False, 16384), (80, "0.6B", False, 8192), (24, "0.6B", False, 2048), (24, "0.6B", True, 16384),
        (140, "4B", False, 4096), (140, "4B", True, 16384), (80, "8B", False, 2048), (80, "8B", True, 16384),
        (8, "8B", False, 2048),  # no row is smaller by itself
    ],
)  # fmt: skip
def test_a_row_fills_a_quarter_of_a_gpu_at_most(memory, gib, shape, checkpointing, tokens) -> None:
    memory(gib)
    settings = PolicyConfig(activation_checkpointing=checkpointing)
    assert row_tokens(settings, SHAPES[shape], GPU) == tokens
    config, sizes = Config(policy=settings), Sizes(SHAPES[shape], 10**9, 10**9, {})
    activations = memory_by_phase(config, sizes, GPU, Ranks())["training"]["activations"]
    assert activations <= gib / 4 or tokens == 2048
    assert tokens == 16384 or 2 * activations > gib / 4
    config.policy.row_tokens = tokens  # chosen or set, the plan is the same
    assert memory_by_phase(config, sizes, GPU, Ranks())["training"]["activations"] == activations


def test_a_setting_wins_and_the_longest_sample_fits(memory) -> None:
    memory(140)
    assert row_tokens(PolicyConfig(row_tokens=300), SHAPES["8B"], GPU) == 300
    assert row_tokens(PolicyConfig(), SHAPES["0.6B"], CPU) == 2048
    assert row_tokens(PolicyConfig(), SHAPES["8B"], GPU, longest=33_000) == 33_000
    config = Config()
    config.rollout.max_prompt_tokens, config.rollout.max_tokens = 1000, 3000
    assert settled(config, SHAPES["0.6B"], CPU).policy.row_tokens == 4000
    assert config.policy.row_tokens == 0  # a resumed run on another machine chooses again


@pytest.mark.parametrize(("gib", "tokens"), [(140, 3864), (80, 2208), (24, 662), (8, 441)])
def test_more_logits_are_held_on_a_larger_gpu(memory, gib, tokens) -> None:
    memory(gib)
    assert logit_elements(GPU) // 151_936 == tokens
    assert 4 * logit_elements(GPU) == max(gib * GIB // 64, 256 * 2**20)
    assert logit_elements(CPU) == 64 * 2**20


def test_without_a_gpu_to_ask_the_smallest_is_chosen() -> None:
    if torch.cuda.is_available():
        assert defaults.gpu_bytes(GPU) == torch.cuda.get_device_properties(0).total_memory
    else:
        assert defaults.gpu_bytes(GPU) == 0
        assert row_tokens(PolicyConfig(), SHAPES["0.6B"], GPU) == 2048


def test_what_was_chosen_is_said(memory, monkeypatch) -> None:
    memory(140)
    monkeypatch.setattr(kernels, "fails", lambda kernel, device, dtype: "" if device == GPU else "no GPU")
    settings = PolicyConfig(row_tokens=8192)
    assert described(settings, GPU) == (
        "layout packed in rows of 8,192 tokens, attention torch varlen, compute bfloat16"
    )
    assert described(PolicyConfig(row_tokens=64, layout=LayoutKind.padded, dtype=Precision.bfloat16), CPU) == (
        "layout padded in rows of 64 tokens, attention SDPA, compute bfloat16"
    )


def test_a_policy_has_the_number_that_was_chosen(tiny_folder) -> None:
    policy, given = Policy.load(tiny_folder, CPU), PolicyConfig()
    assert policy.settings.row_tokens == 2048
    assert Policy.load(tiny_folder, CPU, given).settings.row_tokens == 2048
    assert given.row_tokens == 0
