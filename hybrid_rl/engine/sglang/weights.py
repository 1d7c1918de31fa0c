"""Translate weights between a checkpoint's names and shapes and the form in which SGLang stores them.

SGLang stacks some matrices into one, pads the vocabulary, and with tensor parallelism gives each rank a part.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing import get_sharing_strategy, set_sharing_strategy
from transformers import AutoConfig

from hybrid_rl.engine.base import EngineError
from hybrid_rl.engine.sglang.interface import flat_bucket

# SGLang stacks these matrices of a checkpoint into one, in this order
STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
TIED = ("model.embed_tokens.weight", "lm_head.weight")
OTHER_FORM = ("gemma",)  # SGLang adds one to the weights of its norms
# fields of configurations whose experts are fused into one matrix
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class ModelShapes:
    """Hold what a model's folder says about its weights: shapes by name, and the numbers by which SGLang cuts them."""

    shapes: dict[str, tuple[int, ...]]
    vocabulary: int
    tied: bool
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def read(cls, folder: Path) -> ModelShapes:
        """Read a model's folder.

        Raises EngineError if it has no weights in safetensors files, or weights that could not be compared later.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        if not shapes or not all(math.prod(shape) for shape in shapes.values()):
            raise EngineError(f"{folder} has no weights in *.safetensors files")
        config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
        if config.model_type in OTHER_FORM or any(getattr(config, name, None) for name in EXPERTS):
            raise EngineError(
                f"SGLang keeps the weights of {config.model_type} in another form than their checkpoint, so a handover "
                "could not be checked; use engine=local"
            )
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        tied = bool(config.tie_word_embeddings)
        if tied and all(name in shapes for name in TIED):  # some checkpoints store the one matrix under both names
            del shapes[TIED[1]]
        return cls(shapes, int(config.vocab_size), tied, config.num_hidden_layers, heads, kv_heads, head_dim)

    def kv_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * tokens * dtype.itemsize

    def weight_bytes(self, dtype: torch.dtype) -> int:
        return sum(map(math.prod, self.shapes.values())) * dtype.itemsize

    # ---- to SGLang --------------------------------------------------------------------------------------------------

    def own_name(self, name: str, tensor: Tensor) -> str:
        """Return the checkpoint's name of a weight; a tied one may have either of its two names.

        Raises EngineError for an unknown name or a wrong shape.
        """
        if self.tied and name in TIED and name not in self.shapes:
            name = next(other for other in TIED if other != name)
        if name not in self.shapes:
            raise EngineError(f"update_weights: unknown name {name!r}")
        if tuple(tensor.shape) != self.shapes[name]:
            raise EngineError(
                f"update_weights: {name} has shape {tuple(tensor.shape)}, the engine's is {self.shapes[name]}"
            )
        return name

    # ---- from SGLang ------------------------------------------------------------------------------------------------

    def whole(self, folder: Path) -> dict[str, Tensor]:
        """Return all weights by the checkpoint's names, from the files of `save_sharded_model`, one per parallel rank.

        Raises EngineError for a weight that is stored in another form, or whose copies differ between ranks.
        """
        files = sorted(folder.glob("*.safetensors"), key=lambda file: int(file.stem.split("-")[2]))
        ranks = [load_file(file) for file in files]
        held = {name: self._whole(ranks, name) for name in self.shapes}
        if self.tied:
            held |= dict.fromkeys(TIED, next(held[name] for name in TIED if name in held))
        return held

    def _whole(self, ranks: Sequence[dict[str, Tensor]], name: str) -> Tensor:
        shape = self.shapes[name]
        for alias in (name, *(TIED if self.tied and name in TIED else ())):
            if alias in ranks[0]:
                kind = name.split(".")[-2] if "." in name else ""
                stored = [rank[alias] for rank in ranks]
                if kind in STACKED and len(ranks) > 1:  # stacked in the checkpoint too, and cut part by part
                    rows = self._fused_rows(kind, shape[0])
                    return torch.cat([self._part(stored, kind, rows, i, name) for i in range(len(rows))])
                return self._joined(stored, shape, name)
        head, _, leaf = name.rpartition(".")
        head, _, part = head.rpartition(".")
        for stacked, parts in STACKED.items():
            if part in parts and f"{head}.{stacked}.{leaf}" in ranks[0]:
                rows = [self.shapes[f"{head}.{other}.{leaf}"][0] for other in parts]
                return self._part(
                    [rank[f"{head}.{stacked}.{leaf}"] for rank in ranks], stacked, rows, parts.index(part), name
                )
        raise EngineError(
            f"{name} cannot be compared: SGLang stores it in another form; leave handover.verify off for this model"
        )

    def _fused_rows(self, kind: str, rows: int) -> list[int]:
        if kind == "gate_up_proj":
            return [rows // 2] * 2
        return [self.heads * self.head_dim, *[self.kv_heads * self.head_dim] * 2]

    def _part(self, stored: Sequence[Tensor], kind: str, rows: Sequence[int], index: int, name: str) -> Tensor:
        """Return part number `index` of a stacked matrix; the parts have `rows` rows in the checkpoint."""
        count = len(stored)
        least = self.head_dim if kind == "qkv_proj" else 1  # a head is never cut: more ranks than heads hold copies
        each = [max(whole // count, least) for whole in rows]
        pieces = [matrix.split(each)[index] for matrix in stored]
        return self._joined(pieces, (rows[index], *stored[0].shape[1:]), name)

    def _joined(self, pieces: Sequence[Tensor], shape: tuple[int, ...], name: str) -> Tensor:
        """Return the pieces joined along the dimension in which they are too small, without vocabulary padding."""
        for dim in range(len(shape)):
            if len(pieces) > 1 and pieces[0].shape[dim] < shape[dim]:
                copies = max(1, len(pieces) * pieces[0].shape[dim] // shape[dim])
                _same(pieces, copies, name)
                return torch.cat(list(pieces[::copies]), dim)[: shape[0]]
        _same(pieces, len(pieces), name)
        if tuple(pieces[0].shape[1:]) != shape[1:] or len(pieces[0]) < shape[0]:
            raise EngineError(
                f"{name} cannot be compared: SGLang stores it as {tuple(pieces[0].shape)} instead of {shape}"
            )
        return pieces[0][: shape[0]]


def _same(pieces: Sequence[Tensor], copies: int, name: str) -> None:
    """Raise EngineError unless the pieces in each run of `copies` are equal."""
    for i, piece in enumerate(pieces):
        if not torch.equal(piece, pieces[i - i % copies]):
            raise EngineError(f"SGLang's ranks hold different copies of {name}")


def payload(named: Sequence[tuple[str, Tensor]], device: torch.device, dtype: torch.dtype) -> bytes:
    """Return the pickle of one flat tensor, in memory that SGLang's processes can map, and its description."""
    held = [(name, tensor.detach().to(device, dtype if tensor.is_floating_point() else None)) for name, tensor in named]
    buffer = io.BytesIO()
    with _mapped_by_name():
        ForkingPickler(buffer).dump(flat_bucket(held))
    return buffer.getvalue()


@contextmanager
def _mapped_by_name() -> Iterator[None]:
    """Share host memory by name instead of by file descriptor; GPU memory has its own handles.

    A thread of this process would have to serve the descriptor, and would print a traceback if SGLang's process died
    while it asked for one.
    """
    before = get_sharing_strategy()
    set_sharing_strategy("file_system")
    try:
        yield
    finally:
        set_sharing_strategy(before)
