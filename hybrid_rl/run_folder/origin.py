"""Keep in origin.json how a run was started: the command, and the state of the git repository around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid_rl.machine import git_state
from hybrid_rl.run_folder.files import Unreadable, read_json, write_json

FILE = "origin.json"


def write_origin(folder: Path, command: str) -> None:
    """Write how a new run was started."""
    write_json(folder / FILE, {"command": command, "git": git_state()})


def read_origin(folder: Path) -> dict[str, Any]:
    """Return what write_origin wrote; {} if the file is missing or damaged."""
    try:
        return read_json(folder / FILE)
    except Unreadable:
        return {}
