"""metrics.jsonl: one JSON object a line, appended at once; a resumed run goes on exactly where its checkpoint stood."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hybrid_rl.run_folder.files import atomic_file, plain


class Metrics:
    """The run's metrics file. Lines are flushed as written; `lines` counts them, for the checkpoint."""

    def __init__(self, path: Path | None, keep_lines: int = 0):
        """Open for appending after the first `keep_lines` lines; what a killed run wrote past its checkpoint goes.

        None: count the lines and write none, as ranks other than the first do.
        """
        self.lines, self._file = keep_lines, None
        if path is None:
            return
        kept = path.read_bytes().splitlines(keepends=True)[:keep_lines] if keep_lines else []
        if len(kept) < keep_lines:
            raise ValueError(
                f"{path} has {len(kept)} lines, its checkpoint was written after {keep_lines}; the file was changed"
            )
        with atomic_file(path) as file:
            file.write(b"".join(kept))
        self._file = path.open(
            "a", encoding="utf-8", errors="backslashreplace"
        )  # JSON reads half a surrogate pair as it was

    def write(self, stage: str, **values: Any) -> None:
        self.lines += 1
        if self._file:
            self._file.write(json.dumps({"stage": stage, **plain(values)}, ensure_ascii=False) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """What was written is on the disk when this returns."""
        if self._file:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file:
            self._file.close()
