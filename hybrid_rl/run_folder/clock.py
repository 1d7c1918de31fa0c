"""Keep the start time of a run: prompts are rendered with it for the whole run, also after a resume."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from hybrid_rl.run_folder.checkpoint import CheckpointError
from hybrid_rl.run_folder.files import write_text

FILE = "clock.txt"


def start_clock(folder: Path) -> datetime:
    """Return the current time in whole seconds, and write it to the run's folder."""
    now = datetime.now().replace(microsecond=0)
    write_text(folder / FILE, now.isoformat() + "\n")
    return now


def read_clock(folder: Path) -> datetime:
    """Return the start time of a run. Raises CheckpointError if its file is missing or damaged."""
    try:
        return datetime.fromisoformat((folder / FILE).read_text(encoding="utf-8").strip())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder / FILE} is missing or damaged; write the start time of the run into it, like "
            "2026-11-30T09:00:00, or use resume=never for a new run"
        ) from error
