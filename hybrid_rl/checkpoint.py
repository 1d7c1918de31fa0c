"""Checkpoints: written beside their place, marked complete last, then renamed into it. No pickle anywhere.

    checkpoints/rl_000010/  policy.safetensors  optimizer.safetensors  state.json  COMPLETE

COMPLETE lists every file with its size and CRC-32, so that a damaged checkpoint is found out instead of trained on.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybrid_rl.files import write_json
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.optimizer import Optimizer

MARKER = "COMPLETE"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used, and why."""


@dataclass(slots=True)
class Checkpoint:
    """One complete checkpoint on disk. `state` is the stage, its step, and whatever else the stage put in."""

    folder: Path
    state: dict[str, Any]

    def restore_policy(self, policy: Policy) -> None:
        """Bring back the weights. Raises CheckpointError for a damaged file, and for another model's."""
        self._check_files()
        weights = load_file(self.folder / "policy.safetensors")
        own = _untied(policy)
        if weights.keys() != own.keys() or any(weights[name].shape != own[name].shape for name in own):
            raise CheckpointError(f"{self.folder} holds another model's weights")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(weights[name])

    def restore_optimizer(self, optimizer: Optimizer) -> None:
        tensors = load_file(self.folder / "optimizer.safetensors")
        optimizer.restore(tensors, self.state["optimizer"]["steps"], self.state["optimizer"]["bad"])

    def _check_files(self) -> None:
        for name, (size, crc) in json.loads((self.folder / MARKER).read_text()).items():
            file = self.folder / name
            if not file.is_file() or file.stat().st_size != size or _crc(file) != crc:
                raise CheckpointError(f"{file} is missing or damaged; delete {self.folder} to resume from the one before")


def save(root: Path, stage: str, step: int, policy: Policy, optimizer: Optimizer | None, state: dict[str, Any], keep: int) -> None:
    """Write weights, moments and state, then remove what is older than the last `keep`.

    Raises CheckpointError with the disk's own reason; the checkpoints before are untouched then.
    """
    final = root / f"{stage}_{step:06d}"
    temporary = root / f".{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in _untied(policy).items()}, temporary / "policy.safetensors")
        if optimizer is not None:
            save_file(optimizer.tensors(), temporary / "optimizer.safetensors")
            state = {**state, "optimizer": {"steps": optimizer.steps, "bad": optimizer.bad}}
        write_json(temporary / "state.json", {"stage": stage, "step": step, **state})
        files = sorted(temporary.iterdir())
        for file in files:
            _sync(file)
        write_json(temporary / MARKER, {file.name: [file.stat().st_size, _crc(file)] for file in files})
        _sync(temporary)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        _sync(root)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {final} could not be written ({error.strerror or error}); the one before is untouched"
        ) from error
    for old in complete(root)[:-keep]:
        (old / MARKER).unlink()  # first: a half-deleted folder must not look complete
        shutil.rmtree(old)


def complete(root: Path) -> list[Path]:
    """The complete checkpoints under `root`, oldest first."""
    found = [marker.parent for marker in root.glob(f"[!.]*/{MARKER}")] if root.is_dir() else []
    return sorted(found, key=lambda folder: (_stage_order(folder), folder.name))


def latest(root: Path) -> Checkpoint | None:
    """The newest complete checkpoint, or None where there is none."""
    folders = complete(root)
    return Checkpoint(folders[-1], json.loads((folders[-1] / "state.json").read_text())) if folders else None


def _stage_order(folder: Path) -> int:
    return 1 if folder.name.startswith("rl_") else 0


def _untied(policy: Policy) -> dict[str, Tensor]:
    """Weights by name, each memory once: of tied weights the first name."""
    seen: dict[int, str] = {}
    return {name: t for name, t in policy.model.state_dict().items() if seen.setdefault(t.data_ptr(), name) == name}


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(2**24):
            crc = zlib.crc32(block, crc)
    return crc


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
