"""Sources of tasks beside one file: CSV, folders and names of Hugging Face datasets, Python functions, mixtures. Nothing is downloaded."""

from __future__ import annotations

import datetime
import gzip
import json
import socket

import pytest

from hybrid_rl.data import DataError, load_task_sets
from hybrid_rl.data.files import load_tasks

ROW = {"prompt": "held out", "answer": "1"}
HELD_OUT = {"rows": [ROW], "prompt": "prompt", "answer": "answer"}


def rows(count: int, prefix: str = "q") -> list[dict[str, object]]:
    """As a user's own function would make them."""
    return [{"question": f"{prefix}{i}", "answer": i, "level": i % 3} for i in range(count)]


def seen(tasks) -> list[tuple[str, str, str]]:
    return [(task.messages[-1]["content"], task.answer, task.source) for task in tasks]


def test_csv_holds_texts(tmp_path):
    text = '\ufeffprompt,answer,hint\n"a, ""b""\nc",042,\n\nd,x,y\n'
    (tmp_path / "t.csv").write_text(text, encoding="utf-8", newline="")
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("t.csv", "t.csv.gz"):
        tasks = load_tasks(str(tmp_path / name), HELD_OUT).rl
        assert seen(tasks) == [('a, "b"\nc', "042", ""), ("d", "x", "")]
        assert [task.columns for task in tasks] == [{"hint": ""}, {"hint": "y"}]


def test_a_small_csv_never_opens_to_a_large_one(tmp_path):
    (tmp_path / "t.csv").write_bytes(gzip.compress(b"prompt,answer\n" + (b"a" * 2**16 + b",1\n") * 2**11))
    with pytest.raises(DataError, match="over 200 times its size"):
        load_tasks(str(tmp_path / "t.csv"), HELD_OUT, duplicates="drop")


def test_a_mixture_maps_each_of_its_entries(tmp_path):
    (tmp_path / "code.jsonl").write_text(
        "".join(json.dumps({"id": i, "prompt": f"c{i}", "tests": {"all": [i]}}) + "\n" for i in range(5))
    )
    sets = load_task_sets(
        {
            "_target_": "hybrid_rl.data.files.load_tasks",
            "rl": [
                {"rows": {"_target_": "tests.data.test_sources.rows", "count": 2}, "prompt": "question", "name": "maths", "system_prompt": "Think."},
                {"path": str(tmp_path / "code.jsonl"), "answer": "tests.all", "name": "code", "take": 3},
            ],
            "eval": {"rows": {"_target_": "tests.data.test_sources.rows", "count": 2, "prefix": "e"}, "prompt": "question", "columns": ["level"]},
        },
        rl_tasks=1,
        sft_tasks=0,
    )  # fmt: skip
    assert seen(sets.rl) == [
        ("q0", "0", "maths"),
        ("q1", "1", "maths"),
        *((f"c{i}", f"[{i}]", "code") for i in range(3)),
    ]
    assert [len(task.messages) for task in sets.rl] == [2, 2, 1, 1, 1]
    assert [task.id for task in sets.rl[2:]] == ["rl/code/0", "rl/code/1", "rl/code/2"]
    assert sets.rl[0].columns == {"level": 0}
    assert sets.eval[1].columns == {"level": 1}


def test_what_is_there_twice_is_left_out_and_counted():
    again = [*rows(4), *rows(2), {"question": "held out", "answer": 0}]
    with pytest.raises(
        DataError, match=r"^data.rl, row 5: has the same prompt and answer as data.rl, row 1; .* data.duplicates=drop$"
    ):
        load_tasks(again, HELD_OUT, prompt="question")
    sets = load_tasks(
        {"rows": again, "prompt": "question"}, {"rows": [ROW, ROW]}, sft=[{"prompt": "held out", "answer": "1", "demonstration": "1"},
        {"prompt": "s", "answer": "1", "demonstration": "1"}], duplicates="drop",
    )  # fmt: skip
    assert (len(sets.rl), len(sets.sft), len(sets.eval)) == (4, 1, 1)
    assert sets.notes == (
        "left out 1 eval tasks that are there twice",
        "left out 2 rl tasks that are there twice",
        "left out 1 rl tasks whose prompt is held out",
        "left out 1 sft tasks whose prompt is held out",
    )
    with pytest.raises(
        DataError, match=r"row 2: has id='1' as data.rl, row 1; remove one of them, or give each another"
    ):
        load_tasks(
            [{"id": 1, "prompt": "a", "answer": "1"}, {"id": 1, "prompt": "b", "answer": "1"}],
            HELD_OUT,
            duplicates="drop",
        )


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    def connect(*arguments):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


@pytest.fixture
def datasets(no_network, monkeypatch, tmp_path):
    found = pytest.importorskip("datasets")
    monkeypatch.setattr(found.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return found


TABLE = {
    "question": ["one", "two"],
    "reward_model": [{"ground_truth": "1"}, {"ground_truth": "2"}],
    "when": [datetime.datetime(2024, 1, 2), None],
    "picture": [b"\x00", b"\x01"],
}


def test_folders_of_datasets(datasets, tmp_path):
    train, test = (
        datasets.Dataset.from_dict(TABLE),
        datasets.Dataset.from_dict({**TABLE, "question": ["three", "four"]}),
    )
    datasets.DatasetDict(train=train, test=test).save_to_disk(tmp_path / "saved")
    train.save_to_disk(tmp_path / "one")
    for name, part in (("train", train), ("test", test)):
        (tmp_path / "hub" / "main").mkdir(parents=True, exist_ok=True)
        part.to_parquet(tmp_path / "hub" / "main" / f"{name}-00000-of-00001.parquet")
    (tmp_path / "hub" / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n  - split: test\n    path: main/test-*\n---\n"
    )
    keys = {"prompt": "question", "answer": "reward_model.ground_truth"}
    for folder in ("saved", "hub"):  # train for RL and test for evaluations, as neither names a split
        sets = load_tasks(str(tmp_path / folder), str(tmp_path / folder), **keys)
        assert seen(sets.rl) == [("one", "1", ""), ("two", "2", "")]
        assert seen(sets.eval) == [("three", "1", ""), ("four", "2", "")]
        assert sets.rl[0].columns["when"].startswith("2024-01-02 00:00:00")
        assert "picture" not in sets.rl[0].columns
    hub = {"path": str(tmp_path / "hub"), "subset": "main", "split": "test"}
    assert seen(load_tasks(str(tmp_path / "one"), hub, **keys).rl) == [("one", "1", ""), ("two", "2", "")]
    for entry, message in [
        (
            {"path": str(tmp_path / "saved"), "split": "dev"},
            r"has the splits train, test; choose one: \{path: .*saved, split: train\}",
        ),
        ({"path": str(tmp_path / "one"), "split": "train"}, r"one has no splits; leave it out"),
        (
            {"path": str(tmp_path / "hub"), "subset": "other"},
            r"datasets cannot read the folder: ValueError: BuilderConfig 'other' not found",
        ),
    ]:
        with pytest.raises(DataError, match=message):
            load_tasks(entry, HELD_OUT, **keys)


def test_a_file_of_another_kind_is_no_name_of_a_data_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.json").write_text("[]")
    with pytest.raises(DataError, match=r"data\.rl=data/train\.json.*\.jsonl") as caught:
        load_tasks("data/train.json", HELD_OUT)
    assert "Fetch" not in str(caught.value)


def test_a_data_set_that_is_not_here_says_how_to_fetch_it(datasets):
    with pytest.raises(DataError) as caught:
        load_tasks("openai/gsm8k", HELD_OUT, prompt="question")
    line = str(caught.value)
    assert line.startswith("data.rl=openai/gsm8k: is no file or folder here, and not in the cache of datasets (")
    assert line.endswith(
        "Fetch it once: hf download openai/gsm8k --repo-type dataset --local-dir gsm8k; then give the folder, gsm8k, instead"
    )
    assert "\n" not in line
