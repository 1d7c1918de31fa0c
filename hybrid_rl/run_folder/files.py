"""Write files atomically (temporary file, sync, rename), lock run folders, and read untrusted JSON and YAML."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a binary file that appears at `path` complete or not at all, even if the process or the machine dies."""
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
    """Create the folder if it is missing, and write a file in it. Raises OSError if that fails."""
    with atomic_file(folder / ".writable") as file:
        file.write(b"0")
    (folder / ".writable").unlink(missing_ok=True)  # another rank or run may have removed it


def remove(path: Path) -> None:
    """Remove a file or a folder. Of a link only the link is removed: its target may not belong to the run."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_unfinished(run: Path) -> None:
    """Remove temporary files (.*.tmp) that killed processes left in a run's folder."""
    for folder in (run, run / "rollouts", run / "checkpoints", run / "checkpoints" / "reference"):
        for left in folder.glob(".*.tmp"):
            remove(left)


def sync_tree(folder: Path) -> None:
    """Sync all files under the folder to disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())


class FolderInUse(RuntimeError):
    """Another process writes to the folder, or the folder cannot be locked."""


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock the folder for this process inside the context; the lock of a killed process is released by the kernel.

    Two runs in one folder would overwrite each other's files. Raises FolderInUse if another process holds the lock, and
    OSError if the folder cannot be created or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    descriptor = _locked(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # removed while locked; _locked notices if it opened the removed file
        os.close(descriptor)


def _locked(path: Path) -> int:
    """Return the descriptor of the lock file at `path`, locked.

    If the last holder removed the file between opening and locking, the lock protects nothing: try again.
    """
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError as error:
            reason = "it is a link; remove it" if error.errno == errno.ELOOP else error.strerror
            raise FolderInUse(f"{path} cannot be locked: {reason}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError as error:
            os.close(descriptor)
            raise FolderInUse(
                f"another process is writing to {path.parent}; wait for it, end it, or choose another folder"
            ) from error
        except OSError as error:
            os.close(descriptor)
            raise FolderInUse(f"{path} cannot be locked: {error.strerror}") from error
        os.close(descriptor)


class Unreadable(ValueError):
    """A file is missing, or damaged."""


LARGEST = 2**26  # bytes of a JSON or YAML file; they hold settings and counters
DEEPEST = 100  # levels of nested lists and mappings


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises ValueError for what `json_text` never writes: NaN, infinity, integers beyond 64 bits, deep nesting.
    """
    try:
        return _shallow(json.loads(text, parse_int=_integer, parse_float=_finite, parse_constant=_finite))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file. Raises Unreadable, also if there is no such file."""
    return _read_mapping(path, parse_json)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file of plain values. Raises Unreadable, also if there is no such file."""
    return _read_mapping(path, parse_yaml)


def parse_yaml(text: str | bytes) -> Any:
    """Return the value of a YAML text.

    Raises ValueError if it is damaged, deeply nested, or uses anchors (a few of which can expand to gigabytes).
    """
    import yaml

    class Plain(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("it uses an anchor")
            return super().compose_node(parent, index)

    try:
        return _shallow(yaml.load(text, Plain))
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _read_mapping(path: Path, parse: Callable[[bytes], Any]) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise ValueError("there is no such file")
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it is larger than {LARGEST} bytes")
        value = parse(path.read_bytes())
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise ValueError("it holds no mapping of names")
        return value
    except (OSError, ValueError) as error:
        raise Unreadable(f"{path} is missing or damaged") from error


def _integer(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= (value := int(text)) < 2**63:
        raise ValueError("it holds an integer beyond 64 bits")
    return value


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"it holds the non-finite number {text[:20]}")
    return value


def _shallow(value: Any, left: int = DEEPEST) -> Any:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if children and not left:
        raise ValueError("it is nested too deeply")
    for child in children:
        _shallow(child, left - 1)
    return value


def write_text(path: Path, text: str) -> None:
    """Write the text as UTF-8, atomically."""
    with atomic_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write the value as JSON, atomically; non-finite numbers become null."""
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """Return the value as indented JSON; non-finite numbers become null."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False) + "\n"


def plain(value: Any) -> Any:
    """Return the value with tuples as lists and non-finite numbers as None, which JSON can hold."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
