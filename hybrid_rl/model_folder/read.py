"""Read a Hugging Face model folder: configuration, the model without memory, and the names of the stored weights."""

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

from hybrid_rl.attention.attend import ATTENTION_NAME
from hybrid_rl.model_folder.transformers_private import revert_names, set_attention

# every folder is read from this disk only, and Python code in it is never run
FROM_FOLDER: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CHANCE = re.compile("drop|jitter")  # attention_dropout, resid_pdrop, layerdrop, router_jitter_noise, …


class ModelError(ValueError):
    """A model folder cannot be used; the message says why and what to do."""


def read_config(folder: str | Path) -> PreTrainedConfig:
    """Return config.json as hybrid_rl runs the model: without dropout, with its own attention and default outputs.

    Raises ModelError if the folder's JSON files show that the model cannot be loaded or trained.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ModelError(
            f"model.path={folder} cannot be loaded: it is not a Hugging Face model folder on this disk "
            "(one with a config.json)"
        )
    try:
        config = AutoConfig.from_pretrained(folder, **FROM_FOLDER)
    except Exception as error:
        raise ModelError(f"model.path={folder} cannot be loaded: {reason(error)}") from error
    if method := getattr(config, "quantization_config", None):
        kind = method.get("quant_method") if isinstance(method, dict) else type(method).__name__
        raise ModelError(
            f"model.path={folder} has quantised weights ({kind}), which cannot be trained; "
            "use the model's unquantised folder"
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
    """Reset the keys that choose how transformers runs the model; those that define the model stay."""
    set_attention(config, ATTENTION_NAME)
    config.return_dict, config.output_hidden_states = True, False
    if getattr(config, "output_router_logits", None):
        config.output_router_logits = False
    for name, value in list(vars(config).items()):
        if CHANCE.search(name) and isinstance(value, float) and value:
            setattr(config, name, 0.0)


def read_generation(folder: str | Path, config: PreTrainedConfig) -> GenerationConfig:
    """Return generation_config.json, or config.json's values if it is missing. Raises ModelError if it is not JSON."""
    try:  # transformers would silently ignore a damaged file, and with it the tokens that end a completion
        json.loads((Path(folder) / "generation_config.json").read_bytes())
    except FileNotFoundError:
        return GenerationConfig.from_model_config(config)
    except ValueError as error:
        raise ModelError(f"model.path={folder}: generation_config.json is not JSON: {error}") from error
    return GenerationConfig.from_pretrained(folder, local_files_only=True)


def reason(error: Exception) -> str:
    """Return an error of another library as one line."""
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return (
            "it needs Python code from the folder (auto_map), which is never run; "
            "use a model that transformers implements itself"
        )
    if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
        return "transformers lets no other library compute this model's attention"
    if isinstance(error, SafetensorError):
        text = f"a *.safetensors file is damaged or incomplete, copy it again ({text})"
    elif not isinstance(error, OSError | ValueError):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= 300 else f"{text[:299]}…"


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return the configured model without memory for its parameters."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME)


# ---- names of the stored weights -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """The file, dtype and shape of a stored tensor."""

    file: str
    dtype: str  # as safetensors names it: "F32", "BF16", …
    shape: tuple[int, ...]


def stored_tensors(folder: str | Path) -> dict[str, Stored]:
    """Return name → place of every tensor in the files that transformers reads: model.safetensors, or the index's.

    Raises ModelError for a file that is missing or damaged.
    """
    folder, found = Path(folder), {}
    if not (folder / WEIGHTS).is_file() and not (folder / INDEX).is_file():
        raise ModelError(f"model.path={folder} cannot be loaded: it has neither {WEIGHTS} nor {INDEX}")
    try:
        one = (folder / WEIGHTS).is_file()
        files = {WEIGHTS} if one else set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
        for file in sorted(files):
            with safe_open(folder / file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    part = opened.get_slice(name)
                    found[name] = Stored(file, part.get_dtype(), tuple(part.get_shape()))
    except Exception as error:  # other libraries raise types of their own
        raise ModelError(f"model.path={folder} cannot be loaded: {reason(error)}") from error
    return found


def stored_names(model: PreTrainedModel, tensors: dict[str, Tensor], conversions: Any) -> dict[str, Tensor]:
    """Return `tensors`, keyed by transformers' parameter names, under the names and in the layout of the model's files.

    A tied weight appears under each of its names. `conversions` is what conversions_of the loaded model gives.
    """
    tensors = dict(tensors)
    for one, other in model.all_tied_weights_keys.items():
        for name, alias in ((one, other), (other, one)):
            if name in tensors:
                tensors.setdefault(alias, tensors[name])
    return revert_names(model, tensors, conversions)


def check_stored(folder: str | Path, model: PreTrainedModel) -> None:
    """Raise ModelError if config.json ties two weights that differ in the files.

    Depending on how it loads them, transformers would keep both or one of them. `model` is the configured model without
    memory.
    """
    stored = stored_tensors(folder)
    for one, other in model.all_tied_weights_keys.items():
        if (
            one in stored
            and other in stored
            and not torch.equal(*(_read(Path(folder) / stored[n].file, n) for n in (one, other)))
        ):
            raise ModelError(
                f"model.path={folder}: by config.json {one} is {other} (tie_word_embeddings), but the files hold two "
                f"different tensors; set tie_word_embeddings=false in config.json to use both, "
                f"or remove {one} from {stored[one].file}"
            )


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as opened:
        return opened.get_tensor(name)
