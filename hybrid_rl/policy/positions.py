"""Find how long a sample may be, by a model's config.json and modules: its positions and chunks of attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

OFFSETS = 8  # extra rows that a table of positions may have (OPT: 2)


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit on the tokens of a sample; `reason` says what the model does beyond it, as "has no position beyond …".

    If `hard`, longer samples cannot be computed in rows; otherwise the model was only not trained for them.
    """

    tokens: int
    reason: str
    hard: bool = True


def limits(model: PreTrainedModel) -> list[Limit]:
    """Return every limit of the model, whose parameters may be without memory."""
    text = model.config.get_text_config()
    most, found = getattr(text, "max_position_embeddings", None), []
    ropes = _ropes(text)
    for rope in ropes:
        kind = rope.get("rope_type", "default")
        if kind == "longrope" and (original := rope.get("original_max_position_embeddings")):
            found.append(_follows(kind, int(original), "original_max_position_embeddings"))
        elif "dynamic" in kind and most:
            found.append(_follows(kind, most, "max_position_embeddings"))
    if "chunked_attention" in (getattr(text, "layer_types", None) or []):
        chunk = text.attention_chunk_size
        found.append(
            Limit(chunk, f"attends in chunks beyond {chunk} tokens (attention_chunk_size), which is not supported")
        )
    if most and _has_table(model, most):
        found.append(
            Limit(most, f"has no position beyond {most} tokens (a table of positions, max_position_embeddings)")
        )
    elif most:
        stretched = [rope["factor"] * rope["original_max_position_embeddings"] for rope in ropes if _is_stretched(rope)]
        reach = int(max([most, *stretched]))
        found.append(Limit(reach, f"was not made for more than {reach} tokens (max_position_embeddings)", hard=False))
    return found


def _follows(kind: str, tokens: int, key: str) -> Limit:
    return Limit(
        tokens,
        f"moves all positions of a row when its longest sample has more than {tokens} tokens (rope_type {kind}, {key})",
    )


def _ropes(text: PreTrainedConfig) -> list[dict]:
    """Return the rotary parameters; several if kinds of layers have their own."""
    rope = getattr(text, "rope_parameters", None) or {}
    return (
        [part for part in rope.values() if part]
        if rope and all(isinstance(part, dict | None) for part in rope.values())
        else [rope]
    )


def _is_stretched(rope: dict) -> bool:
    return bool(rope.get("factor")) and bool(rope.get("original_max_position_embeddings"))


def _has_table(model: PreTrainedModel, most: int) -> bool:
    words = model.get_input_embeddings()
    learned = [
        module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding) and module is not words
    ]
    computed = [len(buffer) for buffer in model.buffers() if buffer.dim() == 2]  # GPT-J's sines
    return any(most <= rows <= most + OFFSETS for rows in learned + computed)
