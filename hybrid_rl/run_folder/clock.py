"""A run's clock: the time of its start, which its prompts are rendered with for its whole life, after a resume too."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from hybrid_rl.run_folder.checkpoint import CheckpointError
from hybrid_rl.run_folder.files import write_text

FILE = "clock.txt"


def start_clock(folder: Path) -> datetime:
    """Return the present time, and keep it in the run's folder."""
    now = datetime.now().replace(microsecond=0)
    write_text(folder / FILE, now.isoformat() + "\n")
    return now


def read_clock(folder: Path) -> datetime:
    """Return the time that a run started. Raises CheckpointError where its folder does not say."""
    try:
        return datetime.fromisoformat((folder / FILE).read_text(encoding="utf-8").strip())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder / FILE} is missing or damaged; write the time of the run's start into it, like 2026-11-30T09:00:00, "
            "or resume=never for a new run"
        ) from error
