"""Write a trained model as a copy of its source folder with the trained weights."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hybrid_rl.model_folder.read import INDEX, ModelError, Stored, stored_tensors

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# suffixes of files that hold weights for any library; copies would be weights of another model than the trained one
HOLD_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".npz"}


def write_folder(folder: str | Path, source: str | Path, weights: dict[str, Tensor], float32: bool = False) -> None:
    """Write `weights` to `folder`, with the files, names and dtypes of `source`, and copy its other files.

    `weights` maps the names in `source`'s files to tensors. With `float32` all tensors are written as float32. Tensors
    of `source` that are not in `weights` (transformers does not load them) are copied. Raises ModelError if a value
    does not fit its dtype.
    """
    folder, source = Path(folder), Path(source)
    folder.mkdir(parents=True, exist_ok=True)
    stored, files = stored_tensors(source), defaultdict[str, dict[str, Stored]](dict)
    for name, place in stored.items():
        files[place.file][name] = place
    total = 0
    for file, places in files.items():
        tensors = {}
        with safe_open(source / file, "pt") as opened:
            metadata = opened.metadata()
            for name, place in places.items():
                tensor = weights[name] if name in weights else opened.get_tensor(name)
                tensors[name] = _cast(name, tensor, torch.float32 if float32 else DTYPES.get(place.dtype, tensor.dtype))
        save_file(tensors, folder / file, metadata)
        total += sum(tensor.nbytes for tensor in tensors.values())
    for file_ in source.iterdir():
        if file_.is_file() and not HOLD_WEIGHTS & set(file_.suffixes):
            shutil.copyfile(file_, folder / file_.name)
    if (templates := source / "additional_chat_templates").is_dir():
        shutil.copytree(templates, folder / templates.name, dirs_exist_ok=True)
    if len(files) > 1:
        index = json.loads((source / INDEX).read_bytes())
        if index.get("metadata", {}).get("total_size", total) == total:
            shutil.copyfile(source / INDEX, folder / INDEX)
        else:
            _write_json(folder / INDEX, {**index, "metadata": {**index["metadata"], "total_size": total}})
    if float32:
        _name_dtype(folder / "config.json")


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    cast = tensor.to(dtype, copy=True).contiguous() if tensor.is_floating_point() else tensor.clone()
    if cast.dtype != tensor.dtype and not cast.isfinite().all():
        raise ModelError(
            f"{name} has values that {str(dtype).removeprefix('torch.')} cannot hold; set export.dtype=float32"
        )
    return cast


def _name_dtype(file: Path) -> None:
    """Set every dtype that config.json names to float32."""
    config = json.loads(file.read_bytes())
    changed = False
    for part in [config, *(value for value in config.values() if isinstance(value, dict))]:
        for key in ("torch_dtype", "dtype"):
            if isinstance(part.get(key), str) and part[key] != "float32":
                part[key], changed = "float32", True
    if changed:
        _write_json(file, config)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
