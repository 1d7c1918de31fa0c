"""What hybrid_rl leans on in transformers beside its documented interface: each test names the version that no longer has it."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid_rl.attention.attend import ATTENTION_NAME
from hybrid_rl.model_folder import transformers_private as private
from hybrid_rl.model_folder.read import empty_model, read_config

BROKEN = (
    f"transformers {transformers.__version__} changed what hybrid_rl/model_folder/transformers_private.py relies on"
)


def test_layers_are_named_by_their_class(tiny_folder):
    model = empty_model(read_config(tiny_folder))
    names = private.layer_classes(model)
    layers = [module for module in model.modules() if type(module).__name__ in names]
    assert layers == list(model.model.layers), BROKEN


def test_the_attention_of_a_configuration_is_the_one_that_its_model_runs(tiny_folder):
    config = AutoConfig.from_pretrained(tiny_folder)
    config.__dict__["_attn_implementation"] = "eager"  # as a key of config.json
    private.set_attention(config, ATTENTION_NAME)
    assert private.attention_of(config) == ATTENTION_NAME, BROKEN
    assert not config.output_attentions, BROKEN
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert {private.attention_of(module.config) for module in model.modules() if hasattr(module, "config")} == {
        ATTENTION_NAME
    }, BROKEN


def test_a_configuration_knows_its_folder(tiny_folder):
    assert Path(private.folder_of(AutoConfig.from_pretrained(tiny_folder))) == tiny_folder, BROKEN


def test_names_of_fused_experts_are_reverted_to_the_files(folder_of):
    """Files hold each expert by itself, transformers one tensor for all of them."""
    model = AutoModelForCausalLM.from_pretrained(folder_of("qwen3_moe"))
    conversions = private.conversions_of(model)
    assert conversions, BROKEN
    names = private.revert_names(model, dict(model.state_dict()), conversions)
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in names, BROKEN
    assert "model.layers.0.mlp.experts.gate_up_proj" in model.state_dict(), BROKEN
    assert private.conversions_of(None) is None


def test_checkpointing_reaches_every_layer(tiny_folder):
    model = empty_model(read_config(tiny_folder)).train()
    private.enable_checkpointing(model)
    assert all(layer.gradient_checkpointing for layer in model.model.layers), BROKEN
