"""Small models of several architectures as Hugging Face folders, and plain transformers as the reference for each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import Phase, settings
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hybrid_rl.config import TinyConfig
from hybrid_rl.policy import tiny
from hybrid_rl.policy.model import Policy
from tests.device import DEVICE, ON_GPU, in_float32

pytest.register_assert_rewrite("tests.engine_contract")
torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
settings.register_profile(
    "hybrid_rl", deadline=None, derandomize=True, max_examples=40, database=None, phases=set(Phase) - {Phase.explain}
)
settings.load_profile("hybrid_rl")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the modules that start several ranks in one test process: two of them at once would be four busy processes on two cores.

    Tests that can use a GPU run there alone (`make test-gpu`): the others would not touch it.
    """
    if ON_GPU and (others := [item for item in items if not item.get_closest_marker("gpu")]):
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item.get_closest_marker("gpu")]
    for item in items:
        if hasattr(getattr(item, "module", None), "on_ranks"):
            item.add_marker(pytest.mark.xdist_group("ranks"))


WORDS = ["<reversed_text>", "</reversed_text>"]
# init_std: far larger than for training, so that distributions are peaked and every weight matters
TINY = TinyConfig(
    layers=2, hidden_size=32, intermediate_size=64, heads=4, kv_heads=2, head_dim=16, init_std=0.2, words=WORDS
)

# architectures that run with hybrid_rl's attention: transformers' class prefix and what differs from the common shape
RUNS: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {}),  # biases on q, k, v
    "granite": (
        "Granite",
        {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 1.0},
    ),  # its own attention scale
    "gemma": ("Gemma", {"head_dim": 8}),  # tied and scaled embeddings
    "gpt_neox": ("GPTNeoX", {"num_key_value_heads": None}),  # partial rotary, parallel residual
    "phi3": ("Phi3", {}),  # one matrix for q, k, v
    "granite_scaled": ("Granite", {"logits_scaling": 4.0}),  # logits divided after the head
    "cohere": ("Cohere", {}),  # logits multiplied after the head
    "mistral": ("Mistral", {"sliding_window": 5}),  # a window in every layer
    "gemma2": (
        "Gemma2",
        {"head_dim": 8, "sliding_window": 3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": ("Gemma3", {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}),
    "olmo3": ("Olmo3", {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}),
    "gpt_oss": (
        "GptOss",
        {"head_dim": 8, "num_local_experts": 4, "sliding_window": 4},
    ),  # a sink in every head's softmax
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
}
# those whose samples must not be longer than the model's positions say
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 16,
}
LIMITED: dict[str, tuple[str, dict]] = {
    "gpt2": ("GPT2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "max_position_embeddings": 32}),
    "gptj": ("GPTJ", {"rotary_dim": 4, "max_position_embeddings": 32}),  # a table of sines
    "opt": ("OPT", {"dropout": 0.0, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 32}),
    "phi3_longrope": ("Phi3", {"max_position_embeddings": 64, "original_max_position_embeddings": 16, "rope_parameters": LONGROPE}),
    "llama_dynamic": ("Llama", {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
    "llama4": ("Llama4", {"head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 24, "intermediate_size_mlp": 32}),
    "qwen2_yarn": ("Qwen2", {"max_position_embeddings": 32, "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}}),
}  # fmt: skip
# and those that would be computed wrongly
REFUSED: dict[str, tuple[str, dict]] = {
    "qwen2_moe_window": (  # its window is in its masks alone
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "use_sliding_window": True,
            "sliding_window": 63,
        },
    ),
    "gpt2_dropout": ("GPT2", {}),
    "mamba": ("Mamba", {}),
    "bloom_own_attention": ("Bloom", {}),  # computes attention itself and ignores the layout
}


def build(prefix: str, differs: dict, folder: Path, seed: int) -> None:
    """Save a random model of transformers' class `prefix`, with the tiny model's tokenizer."""
    tokenizer = tiny.character_tokenizer(WORDS)
    shape = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    } | differs  # fmt: skip
    name = next(c for c in (f"{prefix}ForCausalLM", f"{prefix}LMHeadModel") if hasattr(transformers, c))
    kind = getattr(transformers, name)
    torch.manual_seed(seed)
    model = kind(kind.config_class(**{k: v for k, v in shape.items() if (k, v) != ("num_key_value_heads", None)}))
    with torch.no_grad():  # biases start at 0 and norms at 1, where a mistake in them would not show
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(architecture, seed) → its folder, made once. "staggered" is the tiny model with every tenth token an end token."""

    @cache
    def folder_of(name: str, seed: int = 0) -> Path:
        folder = tmp_path_factory.mktemp(name)
        if name in (built := RUNS | LIMITED | REFUSED):
            build(*built[name], folder, seed)
        else:
            tiny.create(folder, TINY, seed)
        if name == "staggered":
            generation = transformers.GenerationConfig.from_pretrained(folder)
            generation.eos_token_id = [generation.eos_token_id, *range(0, 250, 10)]
            generation.save_pretrained(folder)
        return folder

    return folder_of


@pytest.fixture(scope="session")
def tiny_folder(folder_of: Callable[..., Path]) -> Path:
    return folder_of("qwen3")


@pytest.fixture(params=["qwen3", "staggered", *RUNS])
def any_folder(request: pytest.FixtureRequest, folder_of: Callable[..., Path]) -> Path:
    return folder_of(request.param)


@pytest.fixture
def policy(tiny_folder: Path) -> Policy:
    """Fresh for every test: free to be trained."""
    return Policy.load(tiny_folder, DEVICE, in_float32())


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device that TEST_DEVICE chooses: see tests/device.py."""
    return DEVICE


class Reference:
    """Plain transformers, eager attention, one sequence at a time: no line of hybrid_rl takes part."""

    def __init__(self, folder: Path):
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **plain)
        self.exact: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **plain)

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        out = self.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=max_tokens)
        return out[0, len(prompt) :].tolist()

    @torch.no_grad()
    def distribution(self, ids: list[int], temperature: float) -> Tensor:
        """log π of what follows each prefix of `ids`, [len(ids), V] float64."""
        return (self.exact(torch.tensor([ids])).logits[0].double() / temperature).log_softmax(-1)

    def logprobs(self, prompt: list[int], completion: list[int], temperature: float) -> Tensor:
        """log π of each token of the completion, float64."""
        rows = self.distribution([*prompt, *completion], temperature)[len(prompt) - 1 : -1]
        return rows.gather(-1, torch.tensor(completion)[:, None])[:, 0]


@pytest.fixture(scope="session")
def reference_of() -> Callable[[Path], Reference]:
    return cache(Reference)
