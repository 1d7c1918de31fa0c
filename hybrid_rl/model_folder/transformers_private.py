"""What hybrid_rl leans on in transformers beside its documented interface: here alone, so that a new version breaks one
file.

tests/model_folder/test_private.py names the version that broke it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def layer_classes(model: PreTrainedModel) -> set[str]:
    """Return the class names of the modules that are not split over devices: the decoder's layers."""
    return set(model._no_split_modules or ())


def attention_of(config: PreTrainedConfig) -> str | None:
    """Return the name of the attention that a model of this configuration runs."""
    return config._attn_implementation


def set_attention(config: Any, name: str) -> None:
    """Let models of this configuration run the attention of this name, and return no attention weights."""
    config.__dict__.pop(
        "_attn_implementation", None
    )  # transformers stores the key of config.json there, over its own property
    config._attn_implementation = name
    config._output_attentions = False


def folder_of(config: PreTrainedConfig) -> str:
    """Return the folder that a configuration was read from."""
    return config._name_or_path


def conversions_of(model: PreTrainedModel | None) -> Any:
    """Return how a loaded model's weights came from the names in its files; None if they have the same names."""
    return getattr(model, "_weight_conversions", None)


def revert_names(model: PreTrainedModel, tensors: dict[str, Tensor], conversions: Any) -> dict[str, Tensor]:
    """Return tensors that transformers names under the names of the files that `conversions` came from."""
    model._weight_conversions = conversions
    return revert_weight_conversion(model, tensors)


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Let a model compute its layers again in backward."""
    enable = (
        getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    )  # before v5.24
    enable({"use_reentrant": False})
