"""Checkpoints: written beside their place, marked complete last, then renamed into it. No pickle anywhere.

    checkpoints/rl_000010/  policy.00000-of-00002.safetensors     policy.00001-of-00002.safetensors
                            optimizer.00000-of-00002.safetensors  optimizer.00001-of-00002.safetensors  state.json  COMPLETE

A critic's files lie beside them: critic.*, critic_optimizer.*. Each rank writes the rows it holds and reads the rows it
needs, on as many ranks as there are then. A file's metadata says of each tensor which row is its first and the whole
tensor's shape. COMPLETE lists every file with its size and CRC-32, so that a damaged checkpoint is found out instead of
trained on. Copies are made at once and written by a thread; nothing in the thread is collective.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.optimizer import Optimizer
from hybrid_rl.policy.sharding import local
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.run_folder.files import Unreadable, json_text, read_json, remove, write_json, write_text

MARKER = "COMPLETE"
FORMAT = 1  # of the files and of state.json's keys; a checkpoint of another one is refused
NAME = re.compile(r"(sft|rl|weights)_\d{6,18}")
AGAIN = "delete %s to resume from the one before"
T = TypeVar("T")
Shards = dict[str, tuple[str, Tensor]]  # by tensor: [first row, whole shape] as JSON, and the rows


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used, and why."""


@dataclass(slots=True)
class Checkpoint:
    """One complete checkpoint on disk. `state` is the stage, its step, and whatever else the stage put in."""

    folder: Path
    state: dict[str, Any]
    ranks: Ranks = field(default_factory=Ranks)  # those that restore: the policy, which comes first, says who they are

    def restore_policy(self, policy: Policy) -> None:
        """Bring back the weights. Raises CheckpointError for a damaged file, and for another model's."""
        self.ranks = policy.ranks
        _together(self.ranks, f"{self.folder} could not be read", self._check_files)
        _together(self.ranks, f"{self.folder} could not be read", lambda: self._fill("policy", policy.trainable))

    def restore_optimizer(self, optimizer: Optimizer) -> None:
        """Bring back the moments. After restore_policy, which checks their files too."""
        self._restore_moments("optimizer", optimizer)

    def restore_role(self, name: str, model: Policy, optimizer: Optimizer) -> None:
        """Bring back a model that was trained beside the policy, and its moments. After restore_policy, which checks their files too.

        Raises CheckpointError if the run that was saved had none.
        """
        if _moments(name) not in self.state:
            raise CheckpointError(
                f"{self.folder} holds no {name}: the run that wrote it trained none; resume=never for a new run"
            )
        _together(self.ranks, f"{self.folder} could not be read", lambda: self._fill(name, model.trainable))
        self._restore_moments(_moments(name), optimizer)

    def restore(self, part: str, into: Callable[[Any], object]) -> None:
        """Give a part of the run what `state` holds of it. Raises CheckpointError when that does not fit."""
        try:
            into(self.state[part])
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            reason = (
                "it is missing"
                if isinstance(error, KeyError) and error.args == (part,)
                else f"{type(error).__name__}: {error}"
            )
            raise CheckpointError(
                f"{self.folder / 'state.json'} holds no {part} for this run ({reason}); {AGAIN % self.folder}"
            ) from error

    def _restore_moments(self, part: str, optimizer: Optimizer) -> None:
        tensors = optimizer.blank()
        found = _together(self.ranks, f"{self.folder} could not be read", lambda: self._fill(part, tensors, some=True))[
            self.ranks.rank
        ]
        self.restore(part, lambda state: optimizer.restore({name: tensors[name] for name in found}, state))

    def _check_files(self) -> None:
        """Check this rank's share of the files."""
        listed = _marker(self.folder)
        for name in sorted(listed)[self.ranks.rank :: self.ranks.world]:
            file = self.folder / name
            if not file.is_file() or _facts(file) != listed[name]:
                raise CheckpointError(f"{file} is missing or damaged; {AGAIN % self.folder}")
        if extra := sorted(file.name for file in self.folder.glob("*.safetensors") if file.name not in listed):
            raise CheckpointError(f"{self.folder / extra[0]} is not of this checkpoint; delete it")

    def _fill(self, part: str, tensors: Mapping[str, Tensor], some: bool = False) -> list[str]:
        """Copy this rank's rows into its tensors, in place, and return the names found: all, or with `some` those that
        there are (moments before a first step).
        """
        files = [self.folder / name for name in sorted(_marker(self.folder)) if name.startswith(f"{part}.")]
        held: dict[str, dict[Path, range]] = {}
        shapes: dict[str, list[int]] = {}
        for file in files:
            with safe_open(file, "pt") as shards:
                for name, text in shards.metadata().items():
                    first, shapes[name] = json.loads(text)
                    held.setdefault(name, {})[file] = range(first, first + shards.get_slice(name).get_shape()[0])
        if shapes != {name: list(tensor.shape) for name, tensor in tensors.items() if not some or name in shapes}:
            raise CheckpointError(f"{self.folder} holds another model's weights")
        if torn := sorted(
            name for name, pieces in held.items() if not tiles(pieces.values(), shapes[name][0] if shapes[name] else 1)
        ):
            raise CheckpointError(f"{self.folder / part}.*.safetensors do not hold every row of {torn[0]} once")
        for file in files:
            with safe_open(file, "pt") as shards, torch.no_grad():
                for name in shards.keys():  # noqa: SIM118
                    own, rows = _own(tensors[name])
                    copy_rows(rows, own, shards.get_slice(name), held[name][file])
        return list(held)


@dataclass(slots=True)
class Saving:
    """A checkpoint on its way: a thread of each rank writes the rank's files while the run goes on.

    It does not exist before `publish`.
    """

    root: Path
    final: Path
    ranks: Ranks
    written: Future[dict[str, list[int]]]

    def ready(self) -> bool:
        """Return whether every rank's files are written, so that `publish` need not wait. Collective."""
        return all(self.ranks.all_gather(self.written.done()))

    def publish(self, keep: int, best: str | None = None, timeout: float | None = None) -> None:
        """Mark it complete, rename it into its place, then remove what is older than the last `keep`, but not the one named `best`.

        Raises CheckpointError with the disk's own reason, on every rank; the checkpoints before are untouched then. Collective.
        """
        ranks, temporary = self.ranks, _temporary(self.final)

        def finish() -> dict[str, list[int]]:
            try:
                return self.written.result(timeout)
            except TimeoutError as error:
                raise CheckpointError(
                    f"{_broken(self.final)}: it took more than checkpoint.timeout={timeout:g} s"
                ) from error

        def publish() -> None:
            write_json(temporary / MARKER, {name: facts for files in written for name, facts in files.items()})
            _sync(temporary)
            _discard(self.final)
            os.replace(temporary, self.final)
            _sync(self.root)

        try:
            written = _together(ranks, _broken(self.final), finish)
            _together(ranks, _broken(self.final), lambda: publish() if ranks.main else None)
        except CheckpointError:
            if ranks.main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        _together(
            ranks,
            f"a checkpoint before {self.final} could not be removed",
            lambda: prune(self.root, keep, best) if ranks.main else None,
        )


def begin(
    root: Path,
    stage: str,
    step: int,
    policy: Policy,
    optimizer: Optimizer | None,
    state: dict[str, Any],
    roles: Mapping[str, tuple[Policy, Optimizer]] = MappingProxyType({}),
) -> Saving:
    """Copy weights, moments and state as they are now to host memory, and begin to write them; training may go on at once.

    `roles`: models trained beside the policy. Raises CheckpointError as `Saving.publish` does. Collective.
    """
    ranks, final = policy.ranks, root / f"{stage}_{step:06d}"
    parts: dict[str, Mapping[str, Tensor]] = {"policy": policy.trainable}
    if optimizer is not None:
        parts["optimizer"] = optimizer.tensors()
        state = {**state, "optimizer": optimizer.state()}
    for name, (model, own) in roles.items():
        parts |= {name: model.trainable, _moments(name): own.tensors()}
        state = {**state, _moments(name): own.state()}
    text = json_text({"format": FORMAT, "stage": stage, "step": step, **state})  # now: the run changes what it gave

    copies: dict[str, Shards] = {}

    def prepare() -> bool:
        if ranks.main:
            remove(_temporary(final))
            _temporary(final).mkdir(parents=True)
        copies.update({part: _copies(tensors, ranks) for part, tensors in parts.items()})
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return any(copies.values())

    writers = _together(ranks, _broken(final), prepare)
    number = f"{ranks.rank:05d}-of-{sum(writers):05d}"  # the first replica's ranks are the first ranks
    written: Future[dict[str, list[int]]] = Future()

    def write() -> None:
        try:
            written.set_result(_write(_temporary(final), number, copies, text if ranks.main else None))
        except Exception as error:  # raised again when the checkpoint is published
            written.set_exception(error)

    threading.Thread(target=write, name=f"checkpoint {final.name}", daemon=True).start()
    return Saving(root, final, ranks, written)


def save(
    root: Path,
    stage: str,
    step: int,
    policy: Policy,
    optimizer: Optimizer | None,
    state: dict[str, Any],
    keep: int,
) -> None:
    """Write a whole checkpoint: it is on the disk when this returns."""
    begin(root, stage, step, policy, optimizer, state).publish(keep)


def complete(root: Path) -> list[Path]:
    """Return the complete checkpoints under `root`, oldest first; a folder with another name, such as a copy, is none."""
    return [folder for folder in _checkpoints(root) if (folder / MARKER).exists()]


def incomplete(root: Path) -> list[Path]:
    """Return the folders under `root` that look like checkpoints and have no marker, oldest first."""
    return [folder for folder in _checkpoints(root) if not (folder / MARKER).exists()]


def _checkpoints(root: Path) -> list[Path]:
    found = [folder for folder in root.glob("*") if NAME.fullmatch(folder.name)] if root.is_dir() else []
    return sorted(found, key=age)


def age(folder: Path) -> tuple[bool, int]:
    """Return a key that orders checkpoints by age: those of RL come after those of SFT, each by its step."""
    stage, _, step = folder.name.partition("_")
    return stage == "rl", int(step)


def latest(root: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint, or None.

    Raises CheckpointError for a state.json that is damaged or of another version.
    """
    folders = complete(root)
    if not folders:
        return None
    folder, file = folders[-1], folders[-1] / "state.json"
    listed = _marker(folder)  # it says what the file must be, before anything of it is read
    if not file.is_file() or listed.get(file.name) != _facts(file):
        raise CheckpointError(f"{file} is missing or damaged; {AGAIN % folder}")
    state = _read(file)
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} has format {state.get('format', 0)}, this version of hybrid_rl reads {FORMAT} only; resume=never for a new run"
        )
    if f"{state.get('stage')}_{state.get('step'):06d}" != folder.name if isinstance(state.get("step"), int) else True:
        raise CheckpointError(f"{file} is not of this checkpoint; {AGAIN % folder}")
    return Checkpoint(folder, state)


def chunk(rows: int, parts: int, index: int) -> range:
    """Return the rows of one part, split as FSDP2 and torch.chunk do: the last parts may be smaller, or empty."""
    size = -(-rows // parts)
    return range(min(rows, size * index), min(rows, size * (index + 1)))


def copy_rows(target: Tensor, own: range, source: Any, held: range) -> None:
    """Copy the rows that `own` (of `target`) and `held` (of `source`) share; a file's slice reads no others."""
    first, end = max(own.start, held.start), min(own.stop, held.stop)
    if first < end:
        target[first - own.start : end - own.start].copy_(source[first - held.start : end - held.start])


def tiles(pieces: Iterable[range], rows: int) -> bool:
    """Return whether the pieces hold each of `rows` rows once."""
    ordered = sorted((piece.start, piece.stop) for piece in pieces)
    return [0, *(stop for _, stop in ordered)] == [*(start for start, _ in ordered), rows]


def _moments(role: str) -> str:
    return f"{role}_optimizer"


def _own(tensor: Tensor) -> tuple[range, Tensor]:
    """Return the rows of a tensor that this rank holds: which, and themselves. A number is one row."""
    rows = torch.atleast_1d(local(tensor.detach()))
    if not isinstance(tensor, DTensor):
        return range(len(rows)), rows
    mesh, axis = tensor.device_mesh, tensor.placements.index(Shard(0))
    own = chunk(tensor.shape[0], mesh.size(axis), mesh.get_local_rank(axis))
    assert len(own) == len(rows), f"{len(rows)} rows are not {own} of {tensor.shape[0]}"
    return own, rows


def _writes(tensor: Tensor, ranks: Ranks) -> bool:
    """Return whether this rank writes its part of the tensor: of replicas the first one does."""
    if not isinstance(tensor, DTensor):
        return ranks.main
    return all(
        placement.is_shard() or tensor.device_mesh.get_local_rank(axis) == 0
        for axis, placement in enumerate(tensor.placements)
    )


def _temporary(final: Path) -> Path:
    return final.with_name(f".{final.name}.tmp")


def _broken(final: Path) -> str:
    return f"checkpoint {final} could not be written, the one before is untouched"


def _copies(tensors: Mapping[str, Tensor], ranks: Ranks) -> Shards:
    """Copy the rows that this rank writes to host memory, pinned for a GPU: there they are whole after a synchronize."""
    copies: Shards = {}
    for name, tensor in tensors.items():
        if _writes(tensor, ranks):
            own, rows = _own(tensor)
            host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.device.type == "cuda")
            copies[name] = json.dumps([own.start, list(tensor.shape)]), host.copy_(rows, non_blocking=True)
    return copies


def _write(folder: Path, number: str, parts: dict[str, Shards], state: str | None) -> dict[str, list[int]]:
    """Write a rank's files, if there is something to write, and state.json; returns what COMPLETE says of them.

    No collective here.
    """
    written: dict[str, list[int]] = {}
    for part, shards in parts.items():
        if shards:
            file = folder / f"{part}.{number}.safetensors"
            save_file(
                {name: rows for name, (_, rows) in shards.items()},
                file,
                {name: text for name, (text, _) in shards.items()},
            )
            _sync(file)
            written[file.name] = _facts(file)
            shards.clear()  # its memory
    if state is not None:
        write_text(folder / "state.json", state)
        written["state.json"] = _facts(folder / "state.json")
    return written


def _together(ranks: Ranks, broken: str, function: Callable[[], T]) -> list[T]:
    """Return what `function` gives on every rank.

    If it fails on one, raise CheckpointError on all: no rank waits for another.
    """
    value: Any = None
    failed: CheckpointError | None = None
    try:
        value = function()
    except CheckpointError as error:
        failed = error
    except Exception as error:
        failed = CheckpointError(f"{broken}: {getattr(error, 'strerror', None) or f'{type(error).__name__}: {error}'}")
        failed.__cause__ = error
    ranks.agree(failed)
    return ranks.all_gather(value)


def prune(root: Path, keep: int, best: str | None = None) -> None:
    """Remove all complete checkpoints but the last `keep` and the one named `best`. Rank 0 alone."""
    for old in complete(root)[:-keep]:
        if old.name != best:
            _discard(old)


def _discard(folder: Path) -> None:
    """Rename a folder out of sight, then remove it: no half-deleted checkpoint is ever seen.

    What a kill leaves of it goes with the next start.
    """
    if os.path.lexists(folder):
        hidden = folder.with_name(f".{folder.name}.old.tmp")
        remove(hidden)
        os.replace(folder, hidden)
        remove(hidden)


def _marker(folder: Path) -> dict[str, list[int]]:
    """Return what COMPLETE says of each file."""
    listed = _read(folder / MARKER)
    if not all(isinstance(facts, list) for facts in listed.values()):
        raise CheckpointError(f"{folder / MARKER} is missing or damaged; {AGAIN % folder}")
    return listed


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except Unreadable as error:
        raise CheckpointError(f"{error}; {AGAIN % path.parent}") from error


def _facts(path: Path) -> list[int]:
    """Return a file's size and CRC-32."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(2**24):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
