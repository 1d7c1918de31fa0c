"""Read a model folder for training: load it, and refuse a model that rows or an export would get wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hybrid_rl.attention.attend import ATTENTION_NAME, LayerAttention, Packed, configured_windows
from hybrid_rl.model_folder.read import (
    CHANCE,
    FROM_FOLDER,
    ModelError,
    check_stored,
    empty_model,
    read_config,
    reason,
    stored_names,
    stored_tensors,
)
from hybrid_rl.model_folder.tokenizer import read_tokenizer
from hybrid_rl.model_folder.transformers_private import attention_of, conversions_of, folder_of
from hybrid_rl.policy.logprobs import logits_of
from hybrid_rl.policy.positions import limits


@dataclass(frozen=True, slots=True)
class Described:
    """What every rank knows of a model folder, whether it read the weights or not."""

    config: PreTrainedConfig
    generation: GenerationConfig
    tokenizer: PreTrainedTokenizerBase


def hidden_states(model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, layout: object) -> Tensor:
    """Return the last hidden states, [1, T, d], of one row of ids and positions [1, T] int64."""
    return model.base_model(
        input_ids=input_ids, position_ids=position_ids, use_cache=False, layout=layout
    ).last_hidden_state


def read_model(folder: str | Path, row_tokens: int) -> PreTrainedModel:
    """Load the model in float32. Raises ModelError unless it matches both its files and `empty_model`."""
    model: PreTrainedModel
    loaded: dict[str, Any]
    config = read_config(folder)
    read_tokenizer(folder)
    try:
        empty = empty_model(config)
        how = {"dtype": torch.float32, "attn_implementation": ATTENTION_NAME, "use_safetensors": True, **FROM_FOLDER}
        model, loaded = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
            folder, config=config, output_loading_info=True, ignore_mismatched_sizes=True, **how
        )
    except Exception as error:
        raise ModelError(f"model.path={folder} cannot be loaded: {reason(error)}") from error
    if wrong := sorted(loaded["mismatched_keys"]):
        name, stored, wanted = wrong[0]
        raise ModelError(
            f"model.path={folder}: {name} has shape {list(stored)}, by config.json it must have {list(wanted)}"
        )
    if absent := sorted(loaded["missing_keys"]):  # transformers would use random numbers there
        raise ModelError(f"model.path={folder} has no weights for {_some(absent)}")
    if extra := sorted(loaded["unexpected_keys"]):  # transformers would use only a part of them
        raise ModelError(f"model.path={folder} has weights that config.json has no place for: {_some(extra)}")
    check_stored(folder, empty)
    _check_loaded(folder, model, empty)
    _check_chance(model)
    _check_forward(model, row_tokens)
    return model


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}"


def _check_loaded(folder: str | Path, model: PreTrainedModel, empty: PreTrainedModel) -> None:
    """Raise ModelError if the model differs from `empty`, which other ranks use, or an export could not write it."""
    here, there = ({name: p.shape for name, p in m.named_parameters()} for m in (model, empty))
    if here != there:
        differ = sorted(here.items() ^ there.items())
        raise ModelError(f"model.path={folder}: {differ[0][0]} is another one in the files than by config.json")
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and (attention_of(config) != ATTENTION_NAME or not config.return_dict):
            raise ModelError(f"{type(module).__name__} does not run with hybrid_rl's attention: it chooses its own")
    stored = {name: place.shape for name, place in stored_tensors(folder).items()}
    tied = stored_names(empty, dict(model.named_parameters()), conversions_of(model))
    held = {name: tuple(tensor.shape) for name, tensor in tied.items()}
    one_of = [{one, other} for one, other in model.all_tied_weights_keys.items()]
    lost = [
        n
        for n, shape in held.items()
        if stored.get(n, shape) != shape or (n not in stored and not any(n in t and t & stored.keys() for t in one_of))
    ]
    if lost:
        raise ModelError(
            f"{type(model).__name__} cannot be written as it was read: {_some(sorted(lost))} is not in the files of "
            f"{folder}"
        )


@torch.no_grad()
def _check_chance(model: PreTrainedModel) -> None:
    """Raise ModelError for a model that draws random numbers in its forward pass."""
    kind, state = type(model).__name__, torch.get_rng_state()
    ids = torch.arange(4)[None]
    try:
        hidden_states(model.train(), ids, ids, Packed([4]))
    except Exception:  # _check_forward reports it
        return
    if not torch.equal(state, torch.get_rng_state()):
        sources = ", ".join(sorted({name for part in model.modules() for name in _chances(part)})) or "its code"
        raise ModelError(
            f"{kind} draws random numbers while it is trained ({sources}), so no log-probability can be computed again"
        )


def _chances(part: nn.Module) -> list[str]:
    return [
        f"{type(part).__name__}.{name}"
        for name, value in vars(part).items()
        if CHANCE.search(name) and isinstance(value, float) and value
    ]


class _RecordWindows(Packed):
    """Packed rows that record the window that each layer passes to attention."""

    def __init__(self, lengths: list[int]):
        super().__init__(lengths)
        self.windows: dict[int, int | None] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        self.windows[layer] = how.window
        return super().attend(layer, query, key, value, how)


@torch.no_grad()
def _check_forward(model: PreTrainedModel, row_tokens: int) -> None:
    """Compare what rows and chunks of logits give with the model's own eager attention and logits, on a few tokens.

    Raises ModelError for a model that a row of `row_tokens` tokens would compute wrongly.
    """
    kind, config = type(model).__name__, model.config
    ids, positions = torch.tensor([[0, 1, 2, 3, 1, 0], [0, 1, 2, 3, 0, 1]])[:, None]  # samples of 4 and 2 tokens
    far = positions.clone()
    far[0, 3] = min([row_tokens, *(limit.tokens for limit in limits(model) if limit.hard)]) - 1
    logits = logits_of(model.train().get_output_embeddings(), config)
    recorded = _RecordWindows([4, 2])
    try:
        windows = configured_windows(config)
        own = model(input_ids=ids, position_ids=positions, use_cache=False, layout=Packed([4, 2])).logits
        ours = logits(hidden_states(model, ids, positions, recorded))
        alone = logits(hidden_states(model, ids[:, 4:], positions[:, 4:], Packed([2])))
        beside_far = logits(hidden_states(model, ids, far, Packed([4, 2])))
        eager = _eager(model, ids[:, :4])
    except Exception as error:
        raise ModelError(f"{kind} does not run with hybrid_rl's attention: {reason(error)}") from error
    if not own.isfinite().all():
        raise ModelError(f"{folder_of(config)}: its logits are not finite; a weight is NaN or infinite")
    much = 1e-3 * alone.std()  # far above rounding, and below any leak between samples
    if (ours[:, 4:] - alone).abs().max() > much:
        raise ModelError(f"{kind} does not use hybrid_rl's attention: samples packed in a row see each other")
    if not torch.allclose(own, ours, rtol=1e-4, atol=1e-4):
        raise ModelError(f"{kind} changes its logits after the output embeddings in a way that is not supported")
    if (own[:, :4] - eager).abs().max() > 2e-3 * own.std():  # rounding is about 2e-6 in two layers
        raise ModelError(f"{kind} computes attention in a way of its own, which hybrid_rl's attention does not")
    if (beside_far[:, 4:] - alone).abs().max() > much:
        raise ModelError(
            f"{kind} changes all positions of a row with its longest sample; no row can hold several samples"
        )
    for layer, window in enumerate(windows):
        if window is not None and recorded.windows.get(layer) != window and window < row_tokens:
            raise ModelError(
                f"{kind}: layer {layer} has a window of {window} tokens (config.json) that it does not hand to "
                f"attention; only policy.row_tokens={window} or less can be used"
            )


def _eager(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the logits of one sample, [1, T, V], by the model's own attention."""
    model.set_attn_implementation("eager")
    try:
        return model(input_ids=ids, use_cache=False).logits
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
