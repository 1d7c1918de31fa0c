"""A Hugging Face model folder: its configuration, the model without memory, and the names under which its files store the weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hybrid_rl.attention.attend import ATTENTION_NAME

# How every folder is read: from this disk, weights from safetensors alone, and none of the Python code that may lie in it is run.
FROM_FOLDER: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CHANCE = re.compile("drop|jitter")  # attention_dropout, resid_pdrop, layerdrop, router_jitter_noise, …


class ModelError(ValueError):
    """A model folder that cannot be used, with what to do about it."""


def read_config(folder: str | Path) -> PreTrainedConfig:
    """Read config.json as hybrid_rl runs the model: without dropout, and without keys that choose what a forward pass returns.

    Raises ModelError for a model that cannot be had from this folder, as far as its JSON files say.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ModelError(
            f"model.path={folder} cannot be loaded: it is not a Hugging Face model folder on this disk (one with a config.json)"
        )
    try:
        config = AutoConfig.from_pretrained(folder, **FROM_FOLDER)
    except Exception as error:
        raise ModelError(f"model.path={folder} cannot be loaded: {reason(error)}") from error
    if method := getattr(config, "quantization_config", None):
        kind = method.get("quant_method") if isinstance(method, dict) else type(method).__name__
        raise ModelError(
            f"model.path={folder} has quantised weights ({kind}), which cannot be trained; use the model's unquantised folder"
        )
    read_generation(folder, config)
    for part in _parts(config):
        _neutralise(part)
    return config


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _neutralise(config: Any) -> None:
    """Undo what config.json may say of how transformers runs the model; what the model is stays."""
    config.__dict__.pop("_attn_implementation", None)  # transformers stores the key there, over its own property
    config._attn_implementation = ATTENTION_NAME
    config._output_attentions = False
    config.return_dict, config.output_hidden_states = True, False
    if getattr(config, "output_router_logits", None):
        config.output_router_logits = False
    for name, value in list(vars(config).items()):
        if CHANCE.search(name) and isinstance(value, float) and value:
            setattr(config, name, 0.0)


def read_generation(folder: str | Path, config: PreTrainedConfig) -> GenerationConfig:
    """Return generation_config.json, or what config.json says in its place. Raises ModelError where it is not JSON."""
    try:  # transformers would pass over it in silence, and with it over the tokens that end a completion
        json.loads((Path(folder) / "generation_config.json").read_bytes())
    except FileNotFoundError:
        return GenerationConfig.from_model_config(config)
    except ValueError as error:
        raise ModelError(f"model.path={folder}: generation_config.json is not JSON: {error}") from error
    return GenerationConfig.from_pretrained(folder, local_files_only=True)


def reason(error: Exception) -> str:
    """Another library's error in one line."""
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return "it needs Python code that lies in the folder (auto_map), and none is run; use a model that transformers implements itself"
    if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
        return "transformers lets no other library compute this model's attention"
    if isinstance(error, SafetensorError):
        text = f"a *.safetensors file is damaged or not whole, copy it again ({text})"
    elif not isinstance(error, OSError | ValueError):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= 300 else f"{text[:299]}…"


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return the configured model without memory for its parameters."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME)


# ---- the files' names of the weights -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a folder's files hold a tensor, and in which form."""

    file: str
    dtype: str  # as safetensors names it: "F32", "BF16", …
    shape: tuple[int, ...]


def stored_tensors(folder: str | Path) -> dict[str, Stored]:
    """Name → place of every tensor in the files that transformers reads: model.safetensors, or those that its index names.

    Raises ModelError for a file that is missing or damaged.
    """
    folder, found = Path(folder), {}
    if not (folder / WEIGHTS).is_file() and not (folder / INDEX).is_file():
        raise ModelError(f"model.path={folder} cannot be loaded: it has neither {WEIGHTS} nor {INDEX}")
    try:
        files = (
            {WEIGHTS}
            if (folder / WEIGHTS).is_file()
            else set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
        )
        for file in sorted(files):
            with safe_open(folder / file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    part = opened.get_slice(name)
                    found[name] = Stored(file, part.get_dtype(), tuple(part.get_shape()))
    except Exception as error:  # of another library, each with types of its own
        raise ModelError(f"model.path={folder} cannot be loaded: {reason(error)}") from error
    return found


def stored_names(model: PreTrainedModel, tensors: dict[str, Tensor], conversions: Any) -> dict[str, Tensor]:
    """Return `tensors`, named as transformers names them, under the names and in the form that the model's files use.

    A tied weight appears under each of its names. `conversions` is the loaded model's `_weight_conversions`.
    """
    tensors = dict(tensors)
    for one, other in model.all_tied_weights_keys.items():
        for name, alias in ((one, other), (other, one)):
            if name in tensors:
                tensors.setdefault(alias, tensors[name])
    model._weight_conversions = conversions
    return revert_weight_conversion(model, tensors)


def check_stored(folder: str | Path, model: PreTrainedModel) -> None:
    """Raise ModelError where config.json ties two weights that differ in the files.

    Transformers keeps both on one way of loading and one of them on another; `model` is the configured one, without memory.
    """
    stored = stored_tensors(folder)
    for one, other in model.all_tied_weights_keys.items():
        if (
            one in stored
            and other in stored
            and not torch.equal(*(_read(Path(folder) / stored[n].file, n) for n in (one, other)))
        ):
            raise ModelError(
                f"model.path={folder}: by config.json {one} is {other} (tie_word_embeddings), but the files hold two different tensors; "
                f"set tie_word_embeddings=false in config.json to use both, or remove {one} from {stored[one].file}"
            )


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as opened:
        return opened.get_tensor(name)
