"""Where rows of tasks come from: files, Hugging Face datasets in folders or by hub name, Python functions, lists of these.

Nothing is downloaded: a data set that is not on this disk ends in one line that says how to fetch it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid_rl.data.rows import FILES, Row, arrow_rows, kind_of, read_rows, short
from hybrid_rl.data.tasks import DataError

Rows = Iterator[tuple[str, Row, list[str]]]  # (place, row, names of columns that were not read)
OWN = ("path", "rows", "subset", "split", "name", "take")  # an entry's keys beside those of the mapping
SPLITS = {"sft": "train", "rl": "train", "eval": "test"}  # of a data set with several, if it has this one
HUB_NAME = re.compile(r"[\w][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Source:
    """Rows of one place, and what its entry in the settings says of them."""

    where: str  # what messages call it
    read: Callable[[Collection[str], bool], Rows]  # (keys, whether all others too) → rows
    name: str | None = None  # the source of all its tasks
    take: int | None = None  # the first so many tasks; None: all
    mapping: Mapping[str, Any] = field(default_factory=dict)  # the mapping's settings that differ for it


def sources(set_name: str, given: Any, mapping: Collection[str]) -> list[Source]:
    """Return the sources of a set: a path, rows, an entry {path or rows, …}, or a list of paths and entries.

    `mapping` are the settings of the mapping that an entry may change. Raises DataError for anything else.
    """
    key = f"data.{set_name}"
    if isinstance(given, str | Mapping):
        return [_source(set_name, key, given, mapping)]
    if isinstance(given, Sequence) and given and all(isinstance(e, str) or _is_entry(e) for e in given):
        return [_source(set_name, f"{key}[{i}]", entry, mapping) for i, entry in enumerate(given)]
    if isinstance(given, Iterable):
        return [_source(set_name, key, {"rows": given}, mapping)]
    raise DataError(
        f"{key}={short(given)}: must be the path of a {', '.join(FILES[:-1])} or {FILES[-1]} file, "
        "a folder or hub name of datasets, rows, or a list of entries like {path: train.jsonl, name: maths}"
    )


def _is_entry(value: object) -> bool:
    return isinstance(value, Mapping) and ("path" in value or "rows" in value)


def _source(set_name: str, key: str, given: str | Mapping[str, Any], mapping: Collection[str]) -> Source:
    entry: Mapping[str, Any] = {"path": given} if isinstance(given, str) else given
    known = [*OWN, *mapping]
    if unknown := next((name for name in entry if name not in known), None):
        near = difflib.get_close_matches(str(unknown), known, n=1)
        raise DataError(
            f"{key}.{unknown}: there is no such key; {f'did you mean {near[0]}?' if near else f'there are: {known}'}"
        )
    if ("path" in entry) == ("rows" in entry):
        raise DataError(f"{key}: must have either path or rows")
    if bad := next((k for k in ("path", "subset", "split", "name") if not isinstance(entry.get(k, ""), str)), None):
        raise DataError(f"{key}.{bad}={short(entry[bad])}: must be a text")
    take = entry.get("take")
    if take is not None and (not isinstance(take, int) or isinstance(take, bool) or take < 1):
        raise DataError(f"{key}.take={short(take)}: must be a number of tasks")
    own = {name: entry[name] for name in entry if name in mapping}
    name = entry.get("name")
    if "rows" in entry:
        given_rows = entry["rows"]
        return Source(key, lambda keys, every: _python_rows(key, given_rows), name, take, own)
    path, choice = entry["path"], (entry.get("subset"), entry.get("split"))
    if not path.endswith(FILES) and (Path(path).is_dir() or (HUB_NAME.fullmatch(path) and not Path(path).exists())):
        return Source(
            path, lambda keys, every: _dataset_rows(set_name, key, path, choice, keys, every), name, take, own
        )
    if extra := next((name for name in ("subset", "split") if entry.get(name)), None):
        raise DataError(f"{key}.{extra}={entry[extra]}: {path} is a file, which has none; leave it out")
    return Source(path, lambda keys, every: read_rows(key, Path(path), keys, every), name, take, own)


def _python_rows(key: str, rows: object) -> Rows:
    if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
        raise DataError(
            f"{key}: its function returned {kind_of(rows)}; it must return rows, "
            "each an object like {'prompt': …, 'answer': …}"
        )
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise DataError(
                f"{key}, row {number}: is {kind_of(row)} ({short(row)}); "
                "a row is an object like {'prompt': …, 'answer': …}"
            )
        yield f"row {number}", dict(row), []


# ---- Hugging Face datasets -------------------------------------------------------------------------------------------


def _dataset_rows(
    set_name: str, key: str, path: str, choice: tuple[str | None, str | None], keys: Collection[str], every: bool
) -> Rows:
    dataset = _dataset(set_name, key, path, *choice)
    batches = (
        batch for table in dataset.with_format("arrow").iter(1000) for batch in table.combine_chunks().to_batches()
    )
    return arrow_rows(path, dataset.data.schema, batches, keys, every)


def _dataset(set_name: str, key: str, path: str, subset: str | None, split: str | None) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{key}={path}: folders and hub names are read by datasets, which is not installed; "
            "pip install -e '.[data]', or name a .jsonl, .parquet or .csv file"
        ) from error
    folder = Path(path)
    saved = any((folder / file).is_file() for file in ("dataset_dict.json", "state.json"))  # of save_to_disk
    try:
        datasets.disable_progress_bars()
        with _offline():
            found = datasets.load_from_disk(path) if saved else datasets.load_dataset(path, subset)
    except Exception as error:  # of datasets, and of every reader of files that it may use
        if folder.is_dir():
            raise DataError(f"{key}={path}: datasets cannot read the folder: {_first_line(error)}") from error
        name = folder.name
        raise DataError(
            f"{key}={path}: is no file or folder here, and not in the cache of datasets ({_first_line(error)}). "
            f"Fetch it once: hf download {path} --repo-type dataset --local-dir {name}; then give the folder, {name}, instead"
        ) from error
    if not isinstance(found, datasets.DatasetDict):
        if split:
            raise DataError(f"{key}.split={split}: {path} has no splits; leave it out")
        return found
    wanted = split or (next(iter(found)) if len(found) == 1 else SPLITS[set_name])
    if wanted not in found:
        raise DataError(
            f"{key}={path}: has the splits {', '.join(found)}; choose one: {{path: {path}, split: {next(iter(found))}}}"
        )
    return found[wanted]


@contextmanager
def _offline() -> Iterator[None]:
    """Keep datasets and the hub's client from the network: they look for nothing newer than what is on this disk."""
    import datasets.config
    import huggingface_hub.constants as hub

    before = datasets.config.HF_HUB_OFFLINE, hub.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = hub.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, hub.HF_HUB_OFFLINE = before


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join((str(error).strip().splitlines() or [''])[0].split())}"[:200]
