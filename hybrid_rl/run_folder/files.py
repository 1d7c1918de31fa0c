"""Files that are whole or not there: written beside their place, on the disk, then renamed into it."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a binary file that appears at `path` whole or not at all, also where the process or machine dies meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Make the folder where it is not there, and write a file in it. Raises OSError where that cannot be."""
    with atomic_file(folder / ".writable") as file:
        file.write(b"0")
    (folder / ".writable").unlink(missing_ok=True)  # another rank or run may have been here too


def remove_unfinished(run: Path) -> None:
    """Remove what processes that were killed left under a run's folder: their names begin with a dot and end with .tmp."""
    for folder in (run, run / "rollouts", run / "checkpoints", run / "checkpoints" / "reference"):
        for left in folder.glob(".*.tmp"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def sync_tree(folder: Path) -> None:
    """All files under the folder are on the disk when this returns."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())


class FolderInUse(RuntimeError):
    """Another process writes to the folder."""


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder for this process: two runs in one would destroy each other's files. A killed process lets go by itself.

    Raises FolderInUse where another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderInUse(f"another process is writing to {folder}; wait for it, end it, or choose another folder") from error
        try:
            yield
        finally:
            (folder / ".lock").unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with atomic_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    return json.dumps(plain(value), indent=2, ensure_ascii=False) + "\n"


def plain(value: Any) -> Any:
    """For JSON, which has no NaN or infinity: they become null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
