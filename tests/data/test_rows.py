"""Rows of files: every way to write the same row gives the same task, and a small file never opens to a large one."""

import datetime
import decimal
import gzip
import json
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybrid_rl.data import DataError
from hybrid_rl.data.files import load_tasks


@pytest.fixture
def held_out(tmp_path):
    file = tmp_path / "test.jsonl"
    file.write_text(
        json.dumps(
            {"prompt": "held out", "answer": "1", "reward_model": {"ground_truth": "1"}, "a.b": 1, "images": None}
        )
    )
    return str(file)


def tasks_of(file, held_out, **settings):
    return list(load_tasks(rl=str(file), eval=held_out, **settings).rl)


ROWS = b'{"prompt": "a", "answer": "1"}\n\n{"prompt": "b", "answer": "2"}\n'


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
@pytest.mark.parametrize(
    "content",
    [ROWS, gzip.compress(ROWS), gzip.compress(ROWS[:31]) + gzip.compress(ROWS[31:])],
    ids=["plain", "gzip", "two members"],  # the compressed bytes hold the time
)
def test_gzip_is_known_by_its_first_bytes(tmp_path, held_out, name, content):
    (tmp_path / name).write_bytes(content)
    assert [task.answer for task in tasks_of(tmp_path / name, held_out)] == ["1", "2"]


def test_parquet_is_known_by_its_first_bytes(tmp_path, held_out):
    pq.write_table(pa.table({"prompt": ["a"], "answer": ["1"]}), tmp_path / "t.jsonl")
    assert [task.answer for task in tasks_of(tmp_path / "t.jsonl", held_out)] == ["1"]


def test_byte_order_marks_of_files_that_were_joined(tmp_path, held_out):
    mark = b"\xef\xbb\xbf"
    (tmp_path / "t.jsonl").write_bytes(mark + ROWS + mark + ROWS.replace(b'"b"', b'"c"').replace(b'"a"', b'"d"'))
    assert [task.messages[0]["content"] for task in tasks_of(tmp_path / "t.jsonl", held_out)] == ["a", "b", "d", "c"]


@pytest.mark.parametrize("value", [None, [], "", {}])
def test_keys_of_a_message_that_hold_nothing(tmp_path, held_out, value):
    messages = [{"role": "user", "content": "hi", "tool_calls": value, "name": None}]
    (tmp_path / "t.jsonl").write_text(json.dumps({"messages": messages, "answer": "1"}))
    (task,) = tasks_of(tmp_path / "t.jsonl", held_out)
    assert task.messages == ({"role": "user", "content": "hi"},)


def test_empty_lists_of_tool_calls_in_parquet(tmp_path, held_out):
    calls = pa.list_(pa.struct([("id", pa.string())]))
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", calls)]))
    messages = [
        [{"role": "user", "content": "hi", "tool_calls": []}],
        [{"role": "user", "content": "ho", "tool_calls": None}],
    ]
    pq.write_table(pa.table({"messages": pa.array(messages, kind), "answer": ["1", "2"]}), tmp_path / "t.parquet")
    assert [task.messages[0]["content"] for task in tasks_of(tmp_path / "t.parquet", held_out)] == ["hi", "ho"]


NESTED = {
    "prompt": "a", "data_source": "gsm8k", "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "42"}, "extra_info": {"index": 7, "split": "train", "none": None},
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_inner_keys_and_the_columns_that_stay(tmp_path, held_out, suffix):
    file = tmp_path / f"t.{suffix}"
    if suffix == "jsonl":
        file.write_text(json.dumps(NESTED))
    else:
        pq.write_table(pa.Table.from_pylist([NESTED]), file)
    settings = {"answer": "reward_model.ground_truth", "id": "extra_info.index", "source": "data_source"}
    with open(held_out, "w") as other:
        json.dump({**NESTED, "prompt": "held out"}, other)
    (task,) = tasks_of(file, held_out, **settings)
    assert (task.id, task.answer, task.source) == ("rl/7", "42", "gsm8k")
    assert task.columns == {key: NESTED[key] for key in ("ability", "reward_model", "extra_info")}
    (task,) = tasks_of(file, held_out, **settings, columns=["ability", "extra_info.split"])
    assert task.columns == {"ability": "math", "extra_info.split": "train"}
    (task,) = tasks_of(file, held_out, **settings, columns=[])
    assert task.columns == {}


def test_a_key_with_a_dot_in_its_name_comes_before_a_path(tmp_path, held_out):
    (tmp_path / "t.jsonl").write_text('{"prompt": "a", "a.b": 1, "a": {"b": 2}}')
    assert tasks_of(tmp_path / "t.jsonl", held_out, answer="a.b")[0].answer == "1"


def answers(tmp_path, held_out, values):
    pq.write_table(pa.table({"prompt": [str(i) for i in range(len(values))], "answer": values}), tmp_path / "t.parquet")
    return [task.answer for task in tasks_of(tmp_path / "t.parquet", held_out)]


FLOATS = [0.1, 1 / 3, 3.14, 42.0, 1e-45, 3.4028235e38, -0.0, 16777216.0, 1e10]


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
def test_numbers_are_written_as_short_as_their_type_allows(tmp_path, held_out, kind):
    """The text leads back to the same number, and no shorter one does: numpy's own shortest form, of the type itself."""
    values = [value for value in FLOATS if abs(value) <= float(np.finfo(kind.to_pandas_dtype()).max)]
    said = answers(tmp_path, held_out, pa.array([kind.to_pandas_dtype()(value) for value in values], kind))
    assert said[0] == "0.1"
    assert [kind.to_pandas_dtype()(text) for text in said] == [kind.to_pandas_dtype()(value) for value in values]
    shortest = [np.format_float_scientific(kind.to_pandas_dtype()(value), unique=True, trim="-") for value in values]
    assert [len(decimal.Decimal(text).normalize().as_tuple().digits) for text in said] == [
        len(decimal.Decimal(text).normalize().as_tuple().digits) for text in shortest
    ]


def test_small_floats_inside_lists_objects_and_maps(tmp_path, held_out):
    small = pa.float32()
    kind = pa.struct([("l", pa.list_(small)), ("m", pa.map_(pa.string(), small)), ("n", small), ("t", pa.string())])
    values = pa.array([{"l": [0.1, None], "m": [("k", 0.2)], "n": 0.3, "t": "x"}, None], kind)
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": ["1", "2"], "more": values}), tmp_path / "t.parquet")
    one, two = tasks_of(tmp_path / "t.parquet", held_out)
    assert one.columns == {"more": {"l": [0.1, None], "m": [("k", 0.2)], "n": 0.3, "t": "x"}}
    assert two.columns == {"more": None}


def test_what_else_a_parquet_file_may_hold(tmp_path, held_out):
    """As an answer its JSON text; dates, times and decimals are their own text."""
    day = datetime.datetime(2026, 11, 30, 9, 8, 7)
    for values, expected in (
        (pa.array([["x", 'y"'], []]), ['["x", "y\\""]', "[]"]),
        (pa.array([2**64 - 1, 0], pa.uint64()), ["18446744073709551615", "0"]),
        (pa.array([decimal.Decimal("12.50"), decimal.Decimal("-0.01")]), ["12.50", "-0.01"]),
        (pa.array([day.date(), datetime.date(1, 1, 1)]), ["2026-11-30", "0001-01-01"]),
        (pa.array([day, day], pa.timestamp("s")), ["2026-11-30 09:08:07.000"] * 2),
        (pa.array([1, 2], pa.timestamp("ns")), ["1970-01-01 00:00:00.000000001", "1970-01-01 00:00:00.000000002"]),
        (pa.array([5, 6], pa.duration("s")), ["5", "6"]),
        (pa.array(["a\0b", "c"]).dictionary_encode(), ["a\0b", "c"]),
        (pa.array([True, False]), ["true", "false"]),
        (pa.array(["long", "text"], pa.large_string()), ["long", "text"]),
        (pa.array([[1.5, 2.5], [3.0, 4.0]], pa.list_(pa.float32(), 2)), ["[1.5, 2.5]", "[3.0, 4.0]"]),
    ):
        assert answers(tmp_path, held_out, values) == expected


def test_columns_of_bytes_are_left_out(tmp_path, held_out):
    images = pa.array([[{"bytes": b"\xff", "path": "a.png"}]])
    table = pa.table({"prompt": ["a"], "answer": ["1"], "raw": [b"\xff"], "images": images, "level": [3]})
    pq.write_table(table, tmp_path / "t.parquet")
    assert tasks_of(tmp_path / "t.parquet", held_out)[0].columns == {"level": 3}
    with pytest.raises(
        DataError, match=r"task 'rl/.*' of the rl set: its columns are not values that JSON can hold .*bytes"
    ):
        tasks_of(tmp_path / "t.parquet", held_out, columns=["images"])


# ---- files that open to far more than their size -------------------------------------------------------------------------

MIB = 2**20
LONG = pa.array(["a" * MIB])
BOMBS = {
    "a long text, compressed": (lambda: pa.table({"prompt": ["a" * (100 * MIB)], "answer": ["1"]}), {"compression": "brotli", "use_dictionary": False}),
    "a long text, in every row": (lambda: pa.table({"prompt": LONG.take(pa.array([0] * 300)), "answer": list(range(300))}), {"compression": "brotli"}),
    "a list of many zeros": (lambda: pa.table({"prompt": ["a"], "answer": pa.array([np.zeros(20_000_000, np.int8)])}), {"compression": "zstd"}),
    "many rows": (lambda: pa.table({"prompt": pa.array(["a"]).take(pa.array(np.zeros(9_000_000, np.int32))), "answer": pa.nulls(9_000_000, pa.int64())}), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_parquet_file_that_opens_to_far_more_than_its_size(tmp_path, held_out, name):
    table, options = BOMBS[name]
    pq.write_table(table(), tmp_path / "t.parquet", write_statistics=False, **options)
    del table
    assert (tmp_path / "t.parquet").stat().st_size < 100_000
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    with pytest.raises(
        DataError,
        match=r"t\.parquet: has [\d,]+ bytes and opens to [\d,]+ MiB or more, over 200 times its size; it is not read",
    ):
        tasks_of(tmp_path / "t.parquet", held_out)
    assert tracemalloc.get_traced_memory()[1] < 200 * MIB
    tracemalloc.stop()
    assert pa.total_allocated_bytes() - before < 64 * MIB


def test_columns_that_nobody_asked_for_are_no_reason_to_refuse_a_file(tmp_path, held_out):
    table = pa.table({"prompt": ["b"], "answer": ["1"], "huge": ["a" * (100 * MIB)]})
    pq.write_table(table, tmp_path / "t.parquet", compression="brotli", use_dictionary=False)
    with pytest.raises(DataError, match="opens to"):
        tasks_of(tmp_path / "t.parquet", held_out)
    assert tasks_of(tmp_path / "t.parquet", held_out, columns=[])[0].columns == {}
