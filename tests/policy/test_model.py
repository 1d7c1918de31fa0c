"""Model folders: what is wrong with one is said before anything is trained, and an export is a folder like any other."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from hybrid_rl.model_folder.read import ModelError
from hybrid_rl.policy import tiny
from hybrid_rl.policy.model import Policy
from tests.conftest import TINY

CPU = torch.device("cpu")


@pytest.fixture
def folder(tiny_folder, tmp_path):
    return shutil.copytree(tiny_folder, tmp_path / "model")


def test_a_missing_weight_is_an_error_and_not_random(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"has no weights for model.layers.1.mlp.up_proj.weight"):
        Policy.load(folder, CPU)


def test_an_unknown_architecture_or_an_empty_folder(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of", "architectures": ["X"]}))
    with pytest.raises(ModelError, match=r"model.path=.*cannot be loaded"):
        Policy.load(folder, CPU)
    with pytest.raises(ModelError, match="cannot be loaded"):
        Policy.load(tmp_path, CPU)


def test_end_tokens_are_the_generation_configs_and_the_tokenizers(folder):
    policy = Policy.load(folder, CPU)
    own = policy.tokenizer.eos_token_id
    assert policy.end_ids() == {own}
    policy.model.generation_config.eos_token_id = [5, 6]
    assert policy.end_ids() == {5, 6, own}


def test_the_same_seed_makes_the_same_folder_and_another_does_not(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        tiny.create(tmp_path / name, TINY, seed)
    files = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert files["a"] == files["b"] != files["c"]


def test_an_exported_policy_loads_again_bit_for_bit(policy, tmp_path):
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.add_(0.5)
    policy.export(tmp_path / "out")
    again = Policy.load(tmp_path / "out", CPU)
    assert all(torch.equal(a, b) for a, b in zip(policy.model.parameters(), again.model.parameters(), strict=True))
    assert again.tokenizer.chat_template == policy.tokenizer.chat_template
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == policy.tokenizer.get_vocab()
