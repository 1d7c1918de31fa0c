"""What hybrid_rl uses of transformers beyond its public interface. No other file uses such names.

tests/model_folder/test_private.py names the installed version if an update changes one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def layer_classes(model: PreTrainedModel) -> set[str]:
    """Return the class names of the decoder layers, which transformers does not split over devices."""
    return set(model._no_split_modules or ())


def attention_of(config: PreTrainedConfig) -> str | None:
    """Return the name of the attention implementation of the configuration."""
    return config._attn_implementation


def set_attention(config: Any, name: str) -> None:
    """Set the attention implementation of the configuration, without attention weights among the outputs."""
    # transformers stores the key of config.json in __dict__, where it hides transformers' own property
    config.__dict__.pop("_attn_implementation", None)
    config._attn_implementation = name
    config._output_attentions = False


def folder_of(config: PreTrainedConfig) -> str:
    """Return the folder that the configuration was read from."""
    return config._name_or_path


def conversions_of(model: PreTrainedModel | None) -> Any:
    """Return how a loaded model's parameters were converted from the stored ones; None if they were not."""
    return getattr(model, "_weight_conversions", None)


def revert_names(model: PreTrainedModel, tensors: dict[str, Tensor], conversions: Any) -> dict[str, Tensor]:
    """Return tensors, keyed by parameter names, under the names and in the layout of the stored ones."""
    model._weight_conversions = conversions
    return revert_weight_conversion(model, tensors)


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Let a model recompute its layers in backward."""
    # gradient_checkpointing_enable is the name before transformers 5.24
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
