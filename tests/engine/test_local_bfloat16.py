"""The engine contract in bfloat16, with weights that bfloat16 holds exactly, so that only the rounding of activations is left.

What else shares a batch changes that rounding, so the same seed may give other tokens there; within one batch it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hybrid_rl.attention.attend import ATTENTION_NAME
from hybrid_rl.engine.base import Sampling
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.model_folder.tokenizer import end_ids, read_tokenizer
from tests.device import DEVICE
from tests.engine_contract import PROMPTS, EngineContract, collect, requests

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(scope="session")
def folder_of(folder_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    @cache
    def rounded(name: str, seed: int = 0) -> Path:
        folder = copytree(folder_of(name, seed), tmp_path_factory.mktemp(name) / "rounded")
        weights = load_file(folder / "model.safetensors")
        save_file(
            {n: t.bfloat16().to(t.dtype) for n, t in weights.items()}, folder / "model.safetensors", {"format": "pt"}
        )
        return folder

    return rounded


def engine_on(folder: Path, slots: int = 8, capacity: int = 64) -> LocalEngine:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    ends = end_ids(read_tokenizer(folder), model.generation_config, model.config.vocab_size, str(folder))
    engine = LocalEngine(model.eval().to(DEVICE), ends, slots, capacity, DEVICE, torch.bfloat16)
    engine.set_version(0)
    return engine


class TestLocalEngineInBfloat16(EngineContract):
    tolerance = 0.15  # nats, of logits with a spread of about 6: two layers of rounding to 8 bits

    dtype = torch.bfloat16

    @pytest.fixture
    def make_engine(self) -> Callable[..., LocalEngine]:
        return engine_on

    @pytest.fixture(params=["qwen3", "llama", "gemma", "phi3"])
    def any_folder(self, request: pytest.FixtureRequest, folder_of) -> Path:
        return folder_of(request.param)

    # tokens that must not depend on what shares a batch
    test_greedy_tokens_are_those_of_transformers = None
    test_a_seed_has_its_tokens_whatever_else_runs = None
    test_aborted_then_continued_equals_never_aborted = None

    @pytest.mark.parametrize("sampling", [Sampling(0.6), Sampling(1.0)], ids=str)  # the edge of top-k and top-p moves
    def test_first_tokens_have_the_models_distribution(self, make_engine, tiny_folder, reference_of, sampling) -> None:
        super().test_first_tokens_have_the_models_distribution(make_engine, tiny_folder, reference_of, sampling)

    def test_greedy_tokens_are_the_best_to_rounding(self, make_engine, any_folder: Path, reference_of) -> None:
        out = collect(make_engine(any_folder), requests(size=1), Sampling(temperature=0.0, max_tokens=24))
        for i, c in out.items():
            rows = reference_of(any_folder).distribution([*PROMPTS[i], *c.token_ids], 1.0)[len(PROMPTS[i]) - 1 : -1]
            best = rows.max(-1).values
            assert (best - rows.gather(-1, torch.tensor(c.token_ids)[:, None])[:, 0]).max() < 2 * self.tolerance
