"""metrics.jsonl: one JSON object a line, appended at once; a resumed run goes on exactly where its checkpoint stood."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


class Metrics:
    """The run's metrics file. Lines are flushed as written; `lines` counts them, for the checkpoint."""

    def __init__(self, path: Path, keep_lines: int = 0):
        """Open for appending after the first `keep_lines` lines; what a killed run wrote past its checkpoint goes."""
        self.path = path
        kept = path.read_bytes().splitlines(keepends=True)[:keep_lines] if keep_lines else []
        if len(kept) < keep_lines:
            raise ValueError(f"{path} has {len(kept)} lines, its checkpoint was written after {keep_lines}; the file was changed")
        replace_file(path, b"".join(kept))
        self._file = path.open("a", encoding="utf-8")
        self.lines = keep_lines

    def write(self, stage: str, **values: Any) -> None:
        self._file.write(json.dumps({"stage": stage, **_plain(values)}, ensure_ascii=False) + "\n")
        self._file.flush()
        self.lines += 1

    def close(self) -> None:
        self._file.close()


def write_json(path: Path, value: Any) -> None:
    replace_file(path, (json.dumps(_plain(value), indent=2, ensure_ascii=False) + "\n").encode())


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: to a neighbour first, on the disk, then renamed over the old one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
