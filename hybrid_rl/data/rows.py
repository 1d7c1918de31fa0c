"""Rows of .jsonl, .csv and .parquet files and Arrow tables, read under bounds: a small file must not fill the memory.

A file's own first bytes say whether it is gzip or parquet; its name decides otherwise.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from hybrid_rl.data.tasks import DataError

FILES = (".jsonl", ".jsonl.gz", ".parquet", ".csv", ".csv.gz")
LONGEST_LINE = 64 * 2**20  # bytes of a line
DEEPEST = 100  # levels of lists and objects in a row
OPENS_TO = 64 * 2**20  # bytes that a file may always open to; beyond that, RATIO times its own size
RATIO = 200
BOM = b"\xef\xbb\xbf"  # the mark some editors put before UTF-8
MAGIC = {b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}
Row = dict[str, Any]


def read_rows(setting: str, path: Path, keys: Collection[str], every: bool) -> Iterator[tuple[str, Row, list[str]]]:
    """Yield (place, row, names of columns that were not read), one row at a time.

    `setting` is the key that names the file.

    Of a parquet file the columns that hold `keys` are read, and with `every` all others whose values JSON can hold.
    Raises DataError, in one line, for a file that cannot be read and for one that opens to far more than its size.
    """
    if not path.name.endswith(FILES):
        raise DataError(
            f"{setting}={path}: must be a file that ends in .jsonl (one JSON object a line), .csv (names in its first "
            "row), .jsonl.gz, .csv.gz or .parquet, or a folder or hub name (owner/name) of datasets"
        )
    try:
        with path.open("rb") as file:
            start = file.read(6)
        if packed := next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None):
            raise DataError(f"{setting}={path}: is a {packed} file, which is not read; unpack it, or pack it with gzip")
        if start.startswith(b"PAR1") or path.suffix == ".parquet":
            yield from _parquet_rows(path, keys, every)
        else:
            with gzip.open(path) if start.startswith(b"\x1f\x8b") else path.open("rb") as lines:
                as_csv = path.name.endswith((".csv", ".csv.gz"))
                yield from (_csv_rows if as_csv else _json_rows)(path, cast(IO[bytes], lines))
    except (OSError, EOFError, ValueError, zlib.error, MemoryError) as error:
        if isinstance(error, DataError):
            raise
        reason = getattr(error, "strerror", None) or next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DataError(f"{setting}={path}: cannot be read: {reason} (relative paths begin at {Path.cwd()})") from error


class _Opened:
    """Counts the bytes that a file opens to."""

    def __init__(self, path: Path):
        self.path, self.size, self.opened = path, path.stat().st_size, 0

    def add(self, count: int) -> None:
        """Raise DataError if they are out of proportion to the file."""
        self.opened += count
        if self.opened > max(OPENS_TO, RATIO * self.size):
            raise DataError(
                f"{self.path}: has {self.size:,} bytes and opens to {self.opened / 2**20:,.0f} MiB or more, over {RATIO} times its size; "
                "it is not read. Write it anew, uncompressed, if it is meant"
            )


# ---- .jsonl ----------------------------------------------------------------------------------------------------------


def _json_rows(path: Path, file: IO[bytes]) -> Iterator[tuple[str, Row, list[str]]]:
    opened, number = _Opened(path), 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        where = f"{path}, line {number}"
        opened.add(len(line))
        if len(line) > LONGEST_LINE:
            raise DataError(f"{where}: is longer than {LONGEST_LINE // 2**20} MiB; a row is one line")
        if line := line.removeprefix(BOM).strip():
            yield f"line {number}", _object(where, line), []


def _object(where: str, line: bytes) -> Row:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: is not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8"
        ) from error
    try:
        row = DECODER.decode(text)
    except json.JSONDecodeError as error:
        start = max(0, error.pos - 20)
        raise DataError(
            f"{where}, column {error.colno}: is not JSON: {error.msg}, at {text[start : error.pos + 20].strip()!r}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: is not JSON that can be read: {clip(str(error).splitlines()[0])}") from error
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: is {kind_of(row)} ({short(row)}); each line must be one JSON object, like {{'prompt': …, 'answer': …}}"
        )
    if text.count("[") + text.count("{") > DEEPEST and _deep(row):
        raise DataError(
            f"{where}: has lists and objects more than {DEEPEST} levels deep; write its inner part as a text"
        )
    return row


def _deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [
            item
            for node in level
            for item in (node.values() if isinstance(node, dict) else node)
            if isinstance(item, dict | list)
        ]
    return bool(level)


def _once(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        doubled = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {doubled!r} is there twice")
    return row


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON's")


DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_no_number)


# ---- .csv ------------------------------------------------------------------------------------------------------------


def _csv_rows(path: Path, file: IO[bytes]) -> Iterator[tuple[str, Row, list[str]]]:
    """Yield rows of texts; an empty field is "". Line breaks inside quotes belong to their field."""
    csv.field_size_limit(LONGEST_LINE)
    opened, reader = _Opened(path), None

    def counted(lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            opened.add(len(line))
            yield line

    try:
        reader = csv.reader(counted(io.TextIOWrapper(file, encoding="utf-8-sig", newline="")), strict=True)
        names = next(reader, [])
        if doubled := next((name for name in names if names.count(name) > 1), None):
            raise DataError(f"{path}: has two columns {doubled!r}; rename one of them")
        for fields in reader:
            if len(fields) not in (0, len(names)):
                raise DataError(
                    f"{path}, line {reader.line_num}: has {len(fields)} fields, and the first row names {len(names)}; "
                    "quote fields that hold commas"
                )
            if fields:
                yield f"line {reader.line_num}", dict(zip(names, fields, strict=True)), []
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: is not UTF-8 (after line {reader.line_num if reader else 0}); save the file as UTF-8"
        ) from error
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num if reader else 1}: is not CSV: {error}") from error


# ---- .parquet and Arrow ----------------------------------------------------------------------------------------------


def _parquet_rows(path: Path, keys: Collection[str], every: bool) -> Iterator[tuple[str, Row, list[str]]]:
    with pq.ParquetFile(path) as file:
        wanted = _wanted(str(path), file.schema_arrow, keys, every)
        opened, largest = _Opened(path), _check_sizes(path, file.metadata, wanted)

        def batches() -> Iterator[pa.RecordBatch]:
            if not wanted and file.metadata.num_rows:  # one row in which nothing is found
                yield from file.iter_batches(1)
            for batch in file.iter_batches(max(16, min(1000, 4 * OPENS_TO // max(1, largest))), columns=wanted):
                opened.add(batch.nbytes)  # decoded: a long text that every row repeats is stored once
                yield batch

        yield from arrow_rows(str(path), file.schema_arrow, batches(), keys, every)


def _wanted(where: str, schema: pa.Schema, keys: Collection[str], every: bool) -> list[str]:
    """Return the columns that hold `keys`, and with `every` all others whose values JSON can hold."""
    names = schema.names
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"{where}: has two columns {doubled!r}; rename one of them")
    return [f.name for f in schema if _holds_one(f.name, keys) or (every and _plain(f.type) is not None)]


def arrow_rows(
    where: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch], keys: Collection[str], every: bool
) -> Iterator[tuple[str, Row, list[str]]]:
    """Yield what read_rows does of Arrow batches, which hold the columns of `schema` or the wanted ones alone."""
    wanted, number = _wanted(where, schema, keys, every), 0
    others = [name for name in schema.names if name not in wanted]
    for batch in batches:
        if not wanted:
            yield "row 1", {}, others  # in which nothing is found
            return
        batch = batch.select(wanted)
        for place, name in enumerate(wanted):
            plain = _plain(schema.field(name).type)
            if plain not in (None, batch.schema.field(name).type):
                batch = batch.set_column(place, name, batch.column(name).cast(plain))
        for row in _python(where, batch, number):
            number += 1
            yield f"row {number}", row, others


def _holds_one(column: str, keys: Collection[str]) -> bool:
    return any(key == column or key.startswith(f"{column}.") for key in keys)


def _check_sizes(path: Path, metadata: pq.FileMetaData, wanted: Collection[str]) -> int:
    """Return the largest row group's bytes, opened.

    Raise DataError, before anything is read, for what the metadata tells of a bomb.
    """
    sizes, limit = [0], _Opened(path)
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        chunks = [group.column(j) for j in range(group.num_columns)]
        chunks = [
            chunk
            for chunk in chunks
            if chunk.path_in_schema.partition(".")[0] in wanted or chunk.path_in_schema in wanted
        ]
        sizes.append(sum(max(chunk.total_uncompressed_size, 8 * chunk.num_values) for chunk in chunks))
    limit.add(sum(sizes))
    return max(sizes)


def _plain(kind: pa.DataType) -> pa.DataType | None:
    """Return the type to read a column as, so that JSON holds its values: dates, times and decimals as texts; None for
    bytes and the like.
    """
    if types.is_dictionary(kind):
        return _plain(kind.value_type)
    if types.is_duration(kind):
        return pa.int64()
    if types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind) or types.is_decimal(kind):
        return pa.string()
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = _plain(kind.value_type)
        same = types.is_large_list(kind)
        return inner and (
            pa.large_list(inner) if same else pa.list_(inner, kind.list_size if types.is_fixed_size_list(kind) else -1)
        )
    if types.is_struct(kind):
        fields = [(field.name, _plain(field.type)) for field in kind]
        return pa.struct(fields) if all(inner for _, inner in fields) else None
    if types.is_map(kind):
        key, item = _plain(kind.key_type), _plain(kind.item_type)
        return key and item and pa.map_(key, item)
    known = types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_null(kind)
    return kind if known or types.is_string(kind) or types.is_large_string(kind) else None


def _python(path: str, batch: pa.RecordBatch, before: int) -> list[Row]:
    try:
        columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    except UnicodeDecodeError:
        for i in range(batch.num_rows):
            for name in batch.schema.names:
                try:
                    batch.column(name)[i].as_py()
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{path}, row {before + i + 1}: {name}: is not UTF-8; write the file's texts as UTF-8"
                    ) from error
        raise
    for field in batch.schema:
        if _has_small_floats(field.type):
            columns[field.name] = [_shortest(value, field.type) for value in columns[field.name]]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


SMALL = {pa.float32(): np.float32, pa.float16(): np.float16}


def _has_small_floats(kind: pa.DataType) -> bool:
    return kind in SMALL or any(_has_small_floats(kind.field(i).type) for i in range(kind.num_fields))


def _shortest(value: Any, kind: pa.DataType) -> Any:
    """Return a float32 of 0.1 as 0.1: the shortest number that is this float32, not its double 0.10000000149011612."""
    if value is None or not _has_small_floats(kind):
        return value
    if kind in SMALL:
        return float(str(SMALL[kind](value)))
    if types.is_struct(kind):
        return {field.name: _shortest(value[field.name], field.type) for field in kind}
    if types.is_map(kind):
        return [(_shortest(key, kind.key_type), _shortest(item, kind.item_type)) for key, item in value]
    return [_shortest(item, kind.value_type) for item in value]


# ---- values in messages ----------------------------------------------------------------------------------------------


def kind_of(value: Any) -> str:
    return "an empty list" if value == [] else KINDS.get(type(value), f"of type {type(value).__name__}")


NUMBER = "a number"
KINDS = {
    type(None): "null",
    bool: "true or false",
    int: NUMBER,
    float: NUMBER,
    str: "a text",
    list: "a list",
    dict: "an object",
}


def short(value: Any) -> str:
    return clip(repr(value))


def clip(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
