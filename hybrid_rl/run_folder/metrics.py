"""Write metrics.jsonl: one JSON object a line; a resumed run continues after the last line of its checkpoint.

An experiment tracker, if there is one, gets every line too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hybrid_rl.run_folder.files import atomic_file, plain
from hybrid_rl.run_folder.trackers import Tracker


class Metrics:
    """The metrics file of a run. Each line is flushed at once; `lines` counts them, for the checkpoint."""

    def __init__(self, path: Path | None, keep_lines: int = 0):
        """Open the file for appending after its first `keep_lines` lines; remove later ones (of a killed run).

        If `path` is None, as on ranks other than 0, lines are counted and not written. Raises ValueError if the file
        has fewer lines.
        """
        self.lines, self._file = keep_lines, None
        self.tracker: Tracker | None = None
        if path is None:
            return
        kept = path.read_bytes().splitlines(keepends=True)[:keep_lines] if keep_lines else []
        if len(kept) < keep_lines:
            raise ValueError(
                f"{path} has {len(kept)} lines, its checkpoint was written after {keep_lines}; the file was changed"
            )
        with atomic_file(path) as file:
            file.write(b"".join(kept))
        # the escape of a lone surrogate is valid JSON
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")

    def write(self, stage: str, **values: Any) -> None:
        """Append one line; non-finite numbers become null."""
        self.lines += 1
        if self._file:
            self._file.write(json.dumps({"stage": stage, **plain(values)}, ensure_ascii=False) + "\n")
            self._file.flush()
        if self.tracker:
            self.tracker.log(stage, values)

    def sync(self) -> None:
        """Sync what was written to disk."""
        if self._file:
            os.fsync(self._file.fileno())

    def close(self, finished: bool = False) -> None:
        """Close the file, and the tracker's run as finished or not."""
        if self._file:
            self._file.close()
        if self.tracker:
            self.tracker.close(finished)
