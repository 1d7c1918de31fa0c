"""metrics.jsonl: one JSON object a line, appended at once; a resumed run goes on exactly where its checkpoint stood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hybrid_rl.files import atomic_file, plain


class Metrics:
    """The run's metrics file. Lines are flushed as written; `lines` counts them, for the checkpoint."""

    def __init__(self, path: Path, keep_lines: int = 0):
        """Open for appending after the first `keep_lines` lines; what a killed run wrote past its checkpoint goes."""
        self.path = path
        kept = path.read_bytes().splitlines(keepends=True)[:keep_lines] if keep_lines else []
        if len(kept) < keep_lines:
            raise ValueError(f"{path} has {len(kept)} lines, its checkpoint was written after {keep_lines}; the file was changed")
        with atomic_file(path) as file:
            file.write(b"".join(kept))
        self._file = path.open("a", encoding="utf-8")
        self.lines = keep_lines

    def write(self, stage: str, **values: Any) -> None:
        self._file.write(json.dumps({"stage": stage, **plain(values)}, ensure_ascii=False) + "\n")
        self._file.flush()
        self.lines += 1

    def close(self) -> None:
        self._file.close()
