"""What `python -m hybrid_rl.view` shows of a run: its rollout files as values for JSON, read again when they change.

Texts are escaped like on the console: no control character or bidirectional mark of a completion reaches the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hybrid_rl.report.console import visible
from hybrid_rl.report.read import mapping, read_run, text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SEARCHED = ("task_id", "prompt", "completion", "answer", "error")
FACTS = (
    *("task_id", "source", "group_id", "index", "reward", "outcome", "reward_parts", "advantage", "trained"),
    *("finish_reason", "fault", "prompt_length"),  # None in files of versions that had no such column
)
# per sampled token: name for the page → column; those after the first are not in every file
TOKENS = {"logprob": "logprobs", "log_ratio": "log_ratios", "entropy": "entropies", "advantage": "advantages"}
MOST = 64  # rollouts in one answer


class Unknown(ValueError):
    """A file, row or argument that there is not."""


class Viewer:
    """The rollouts of the run in `folder`, finished or not."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._tokenizer: Tokenizer | None = None

    def run(self) -> dict[str, Any]:
        """Return the run's name, whether it is finished, and its rollout files in order, with the rewards of steps."""
        run = read_run(self.folder)
        files = sorted((self.folder / "rollouts").glob("[!.]*.parquet"), key=lambda f: _place(f.stem))
        rewards = {f"step_{r['step']:04d}": r.get("reward") for r in run.rl}
        return {
            "name": visible(text(run.config.get("name"))),
            "folder": visible(str(self.folder)),
            "finished": bool(run.summary),
            "files": [{"name": f.stem, "label": visible(_label(f.stem)), "reward": rewards.get(f.stem)} for f in files],
        }

    def rows(self, file: str, query: str = "") -> dict[str, Any]:
        """Return the facts of every rollout of a file, or of those in which the query occurs, and what tokens have."""
        table = self._table(file)
        found = np.arange(table.num_rows)
        if query:
            hits = np.zeros(table.num_rows, bool)
            for name in SEARCHED:
                hit = pc.match_substring(table[name], query, ignore_case=True)
                hits |= np.asarray(pc.fill_null(hit, False).to_numpy(), bool)
            found = found[hits]
        columns = {name: _column(table, name, found) for name in FACTS}
        lengths = _true(table["loss_mask"])[found]
        rows = [
            {
                **{name: columns[name][i] for name in FACTS},
                "task_id": visible(columns["task_id"][i]),
                "source": visible(columns["source"][i]),
                "reward_parts": {visible(name): value for name, value in columns["reward_parts"][i] or ()},
                "row": int(row),
                "length": int(lengths[i]),
            }
            for i, row in enumerate(found)
        ]
        return {"rows": rows, "tokens": [name for name, column in TOKENS.items() if _measured(table, column)]}

    def rollouts(self, file: str, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return texts and tokens of rollouts by their row numbers, at most MOST."""
        table = self._table(file)
        if len(rows) > MOST or any(not 0 <= row < table.num_rows for row in rows):
            raise Unknown(f"{file} has no such rows, or more than {MOST} were asked for")
        return [
            self._rollout(row, record) for row, record in zip(rows, table.take(list(rows)).to_pylist(), strict=True)
        ]

    def _rollout(self, row: int, record: dict[str, Any]) -> dict[str, Any]:
        start, mask = record["prompt_length"], record["loss_mask"]
        ids = record["token_ids"][start:]
        tokens: dict[str, Any] = {"id": ids, "text": self._pieces(ids), "sampled": [int(s) for s in mask[start:]]}
        for name, column in TOKENS.items():
            if record.get(column) is not None:
                tokens[name] = [_rounded(value) for value in record[column][start:]]
        versions = [[segment["version"], segment["count"]] for segment in record["versions"]]
        measures = {visible(name): value for name, value in record.get("measures") or ()}
        texts = {name: visible(record.get(name) or "") for name in (*SEARCHED[1:], "extracted")}
        return {
            "row": row,
            "seed": str(record["seed"]),
            "versions": versions,
            "tokens": tokens,
            "measures": measures,
            **texts,
        }

    def _pieces(self, ids: Sequence[int]) -> list[str] | None:
        """Return the text of each token, "" for one that only begins a character; None without a tokenizer.json."""
        from tokenizers.decoders import DecodeStream

        if self._tokenizer is None:
            self._tokenizer = _tokenizer(self.folder)
        if self._tokenizer is None:
            return None
        stream = DecodeStream(skip_special_tokens=False)
        return [visible(stream.step(self._tokenizer, token) or "") for token in ids]

    def _table(self, file: str) -> pa.Table:
        path = self.folder / "rollouts" / f"{file}.parquet"
        if not file.replace("_", "").isalnum() or not path.is_file():
            raise Unknown(f"there are no rollouts {file}")
        try:
            return _read(path, path.stat().st_mtime_ns)
        except (OSError, pa.ArrowException) as error:
            raise Unknown(f"{path} cannot be read: {error}") from error


@lru_cache(maxsize=4)
def _read(path: Path, changed: int) -> pa.Table:
    with pq.ParquetFile(path) as file:
        return file.read().combine_chunks()


def _tokenizer(folder: Path) -> Tokenizer | None:
    from tokenizers import Tokenizer

    path = text(mapping(read_run(folder).config, "model").get("path"))
    for model in (folder / "base_model", *([Path(path)] if path else []), folder / "final"):
        if (model / "tokenizer.json").is_file():
            return Tokenizer.from_file(str(model / "tokenizer.json"))
    return None


def _column(table: pa.Table, name: str, rows: np.ndarray) -> list[Any]:
    return table[name].take(rows).to_pylist() if name in table.column_names else [None] * len(rows)


def _measured(table: pa.Table, column: str) -> bool:
    """Return whether any rollout of the file has the column; files of earlier versions lack some."""
    return column in table.column_names and table[column].null_count < table.num_rows


def _true(masks: pa.ChunkedArray) -> np.ndarray:
    """Return how many values of each list are true."""
    every = masks.combine_chunks()
    offsets = np.asarray(every.offsets)
    sums = np.concatenate([[0], np.cumsum(every.values.to_numpy(zero_copy_only=False))])
    return np.asarray(sums[offsets[1:]] - sums[offsets[:-1]])


def _rounded(value: float | None) -> float | None:
    return round(float(value), 4) if value is not None and math.isfinite(value) else None


def _place(name: str) -> tuple[int, int, str]:
    """Return where a file stands in the order of the run."""
    if name in (first := ("eval_model", "eval_base", "eval_sft")):
        return 0, first.index(name), name
    digits = name.rpartition("_")[2]
    return (1, int(digits), name) if digits.isdecimal() else (2, 0, name)


def _label(name: str) -> str:
    kind, _, which = name.partition("_")
    if kind == "step" and which.isdecimal():
        return f"step {int(which)}"
    step = which.removeprefix("step_")
    return f"evaluation, step {int(step)}" if step.isdecimal() else f"evaluation, {which}"
