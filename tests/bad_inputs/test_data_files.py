"""Tasks in files: each bad row ends in one line with file, line, key, value and what to do, before the model loads."""

import gzip
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from hybrid_rl import session, stages
from hybrid_rl.config import ConfigError, TinyConfig
from hybrid_rl.data import TaskSets, render
from hybrid_rl.model_folder import tokenizer
from hybrid_rl.policy import tiny
from hybrid_rl.preflight.settings import load
from hybrid_rl.types import Task

GOOD = ['{"prompt": "one", "answer": "1"}', '{"prompt": "two", "answer": "2"}']
MESSAGE = "a message is {'role': 'user', 'content': '…'}"
WHAT = "it must be a text, or a list of messages like [{'role': 'user', 'content': '…'}]"
PAIR = "has half of a surrogate pair, which is no character; escape both halves, or write the character itself"


class Begins(str):
    """What the message begins with; the rest is Python's own, and differs between versions."""


def said(*messages: dict, **other: object) -> str:
    return json.dumps({"messages": list(messages), "answer": "1", **other})


def user(content: object = "hi", **other: object) -> dict:
    return {"role": "user", "content": content, **other}


# name: the second line of train.jsonl → the whole message after "train.jsonl, line 2"
ROWS: dict[str, tuple[str | bytes, str]] = {
    "not JSON": ("hello", ", column 1: is not JSON: Expecting value, at 'hello'"),
    "trailing comma": ('{"prompt": "a", "answer": "b",}', Begins(", column 3")),
    "cut off": ('{"prompt": "a", "answ', ", column 17: is not JSON: Unterminated string starting at, at '"'{"prompt": "a", "answ'"'"),
    "single quotes": ("{'prompt': 'a'}", ", column 2: is not JSON: Expecting property name enclosed in double quotes, at \"{'prompt': 'a'}\""),
    "two objects": ('{"prompt": "a"} {}', ", column 17: is not JSON: Extra data, at '"'{"prompt": "a"} {}'"'"),
    "a tab in a text": ('{"prompt": "a\tb", "answer": "1"}', ", column 14: is not JSON: Invalid control character at, at '"'{"prompt": "a\\tb", "answer": "1"}'"'"),
    "not UTF-8": (b'{"prompt": "caf\xe9", "answer": "1"}', ": is not UTF-8 (byte 16 of the line); save the file as UTF-8"),
    "a list": ('["a", "b"]', ": is a list (['a', 'b']); each line must be one JSON object, like {'prompt': …, 'answer': …}"),
    "a number": ("7", ": is a number (7); each line must be one JSON object, like {'prompt': …, 'answer': …}"),
    "null": ("null", ": is null (None); each line must be one JSON object, like {'prompt': …, 'answer': …}"),
    "an empty object": ("{}", ": has no 'prompt', which is what the policy is asked (set data.prompt to the key that has it); the row is empty"),
    "a key twice": ('{"prompt": "a", "prompt": "b", "answer": "1"}', ": is not JSON that can be read: the key 'prompt' is there twice"),
    "NaN": ('{"prompt": "a", "answer": NaN}', ": is not JSON that can be read: NaN is no number of JSON's"),
    "infinite": ('{"prompt": "a", "answer": 1e999}', ": answer=inf: is a number, which has no JSON text; write it as a text"),
    "too deep": ("[" * 100_000, Begins(": is not JSON that can be read: maximum recursion depth exceeded")),
    "too many digits": ('{"prompt": "a", "answer": ' + "1" * 5000 + "}", Begins(": is not JSON that can be read: Exceeds the limit (4300 digits)")),
    "far too deep for a worker": ('{"prompt": "a", "answer": "1", "x": ' + "[" * 150 + "]" * 150 + "}", ": has lists and objects more than 100 levels deep; write its inner part as a text"),
    "objects far too deep": ('{"prompt": "a", "answer": "1", "x": ' + '{"a":' * 150 + "1" + "}" * 151, ": has lists and objects more than 100 levels deep; write its inner part as a text"),
    "many keys, the last twice": ("{" + ", ".join(f'"k{i}": 1' for i in range(100_000)) + ', "k99999": 1}', ": is not JSON that can be read: the key 'k99999' is there twice"),
    "no prompt": ('{"question": "a", "answer": "1"}', ": has no 'prompt', which is what the policy is asked (set data.prompt to the key that has it); there are: question, answer"),
    "nearly prompt": ('{"promt": "a", "answer": "1"}', ": has no 'prompt'; did you mean 'promt'? Then set data.prompt=promt"),
    "no answer": ('{"prompt": "a", "solution": "1"}', ": has no 'answer', which is what the reward compares with (set data.answer to the key that has it; answer=null if there is none); there are: prompt, solution"),
    "answer null": ('{"prompt": "a", "answer": null}', ": answer=None: is null; give it a value, or remove the row"),
    "prompt null": ('{"prompt": null, "answer": "1"}', ": prompt=None: is null; give it a value, or remove the row"),
    "prompt a number": ('{"prompt": 3, "answer": "1"}', f": prompt=3: is a number; {WHAT}"),
    "prompt true": ('{"prompt": true, "answer": "1"}', f": prompt=True: is true or false; {WHAT}"),
    "prompt an object": ('{"prompt": {"role": "user"}, "answer": "1"}', ": prompt={'role': 'user'}: is an object; " + WHAT),
    "prompt an empty list": ('{"prompt": [], "answer": "1"}', f": prompt=[]: is an empty list; {WHAT}"),
    "prompt a list of texts": ('{"prompt": ["a"], "answer": "1"}', f": prompt[0]='a': is a text; {MESSAGE}"),
    "prompt empty": ('{"prompt": "", "answer": "1"}', ": prompt='': is empty"),
    "prompt only spaces": ('{"prompt": " \\n\\u00a0", "answer": "1"}', r": prompt=' \n\xa0': is empty"),
    "prompt half a pair": ('{"prompt": "a\\ud800", "answer": "1"}', rf": prompt='a\ud800': {PAIR}"),
    "answer half a pair": ('{"prompt": "a", "answer": "\\udc00"}', rf": answer='\udc00': {PAIR}"),
    "answer half a pair inside": ('{"prompt": "a", "answer": ["\\udc00"]}', rf""": answer='["\udc00"]': {PAIR}"""),
    "messages null": ('{"messages": null, "answer": "1"}', ": has no 'prompt', which is what the policy is asked (set data.prompt to the key that has it); there are: messages, answer"),
    "messages a text": ('{"messages": "hi", "answer": "1"}', f": messages='hi': is a text; {WHAT}"),
    "messages empty": ('{"messages": [], "answer": "1"}', f": messages=[]: is an empty list; {WHAT}"),
    "a tool call": (said(user(tool_calls=[{"id": "1"}])), ": messages[0].tool_calls=[{'id': '1'}]: is not supported; a message has role and content only"),
    "no role": (said({"content": "hi"}), ": messages[0]={'content': 'hi'}: has no role; " + MESSAGE),
    "no content": (said(user(), {"role": "user"}), ": messages[1]={'role': 'user'}: has no content; " + MESSAGE),
    "content in parts": (said(user([{"type": "text", "text": "hi"}])), ": messages[0].content=[{'type': 'text', 'text': 'hi'}]: is a list; it must be a text"),
    "content empty": (said({"role": "system", "content": ""}, user()), ": messages[0].content='': is empty"),
    "unknown role": (said({"role": "usr", "content": "hi"}), ": messages[0].role='usr': must be one of system, developer, user, assistant, tool"),
    "another key": (said(user(tool_calls=[1])), ": messages[0].tool_calls=[1]: is not supported; a message has role and content only"),
    "answered already": (said(user(), {"role": "assistant", "content": "yo"}), ": messages[1].role='assistant': is the last message, and the policy is to answer; move it to 'demonstration'"),
    "demonstration a list": ('{"prompt": "a", "answer": "1", "demonstration": ["x"]}', ": demonstration=['x']: is a list; it must be a text"),
    "id true": ('{"prompt": "a", "answer": "1", "id": true}', ": id=True: is true or false; it must be a text"),
    "id empty": ('{"prompt": "a", "answer": "1", "id": ""}', ": id='': is empty"),
    "id of two lines": ('{"prompt": "a", "answer": "1", "id": "a\\nb"}', r": id='a\nb': must be one line without control characters"),
    "source a list": ('{"prompt": "a", "answer": "1", "source": ["x"]}', ": source=['x']: is a list; it must be a text"),
    "a long value": ('{"prompt": ["' + "x" * 200 + '"], "answer": "1"}', ": prompt[0]='" + "x" * 58 + f"…: is a text; {MESSAGE}"),
    "the same row": (GOOD[0], ": has the same prompt and answer as train.jsonl, line 1; remove one of them, give each an 'id' of its own, or set data.duplicates=drop"),
    "a held-out prompt": ('{"prompt": "held out", "answer": "other"}', ": has the prompt of test.jsonl, line 1; what evaluations measure must not be trained on: remove one, or set data.duplicates=drop"),
}  # fmt: skip


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A good test.jsonl, and no model: a bad row is found before one loads."""
    (tmp_path / "test.jsonl").write_text('{"prompt": "held out", "answer": "1"}\n')
    monkeypatch.setattr(session.Policy, "load", lambda *_, **__: pytest.fail("the model was loaded first"))
    return tmp_path


def section(**settings):
    return {"_target_": "hybrid_rl.data.files.load_tasks", "rl": "train.jsonl", "eval": "test.jsonl", **settings}


@pytest.mark.parametrize("name", ROWS)
def test_bad_row(name, files, last_line):
    row, expected = ROWS[name]
    row = row if isinstance(row, bytes) else row.encode()
    (files / "train.jsonl").write_bytes(GOOD[0].encode() + b"\n" + row + b"\n" + GOOD[1].encode() + b"\n")
    line = last_line(data=section())
    assert line == f"train.jsonl, line 2{expected}" or (
        isinstance(expected, Begins) and line.startswith(f"train.jsonl, line 2{expected}")
    )


TRAIN = "".join(f"{row}\n" for row in GOOD).encode()

# name: settings of `data`, content of a file → the whole message
FILES: dict[str, tuple[dict, dict[str, bytes], str]] = {
    "not there": ({"rl": "no.jsonl"}, {}, "data.rl=no.jsonl: cannot be read: No such file or directory (relative paths begin at {here})"),
    "a folder": ({"rl": "folder.jsonl"}, {"folder.jsonl/x": b""}, "data.rl=folder.jsonl: cannot be read: Is a directory (relative paths begin at {here})"),
    "another kind": ({"rl": "train.txt"}, {"train.txt": b"a,b"}, "data.rl=train.txt: must be a file that ends in .jsonl (one JSON object a line), .csv (names in its first row), .jsonl.gz, .csv.gz or .parquet, or a folder or hub name (owner/name) of datasets"),
    "a list of numbers": ({"rl": [1, 2]}, {}, "data.rl, row 1: is a number (1); a row is an object like {{'prompt': …, 'answer': …}}"),
    "an entry without a place": ({"rl": {"name": "a"}}, {}, "data.rl: must have either path or rows"),
    "an entry's key": ({"rl": [{"path": "train.jsonl", "pronpt": "a"}]}, {}, "data.rl[0].pronpt: there is no such key; did you mean prompt?"),
    "an entry's split": ({"rl": {"path": "train.jsonl", "split": "train"}}, {}, "data.rl.split=train: train.jsonl is a file, which has none; leave it out"),
    "an entry's number": ({"rl": {"path": "train.jsonl", "take": 0}}, {}, "data.rl.take=0: must be a number of tasks"),
    "a csv of two widths": ({"rl": "t.csv"}, {"t.csv": b"prompt,answer\na,1\nb,1,2\n"}, "t.csv, line 3: has 3 fields, and the first row names 2; quote fields that hold commas"),
    "a csv column twice": ({"rl": "t.csv"}, {"t.csv": b"prompt,prompt\na,1\n"}, "t.csv: has two columns 'prompt'; rename one of them"),
    "a csv in Latin-1": ({"rl": "t.csv"}, {"t.csv": b"prompt,answer\ncaf\xe9,1\n"}, "t.csv: is not UTF-8 (after line 0); save the file as UTF-8"),
    "a csv's open quote": ({"rl": "t.csv"}, {"t.csv": b'prompt,answer\n"a,1\n'}, "t.csv, line 2: is not CSV: unexpected end of data"),
    "a csv without answers": ({"rl": "t.csv"}, {"t.csv": b"prompt\na\n"}, "t.csv, line 2: has no 'answer', which is what the reward compares with (set data.answer to the key that has it; answer=null if there is none); there are: prompt"),
    "no eval": ({"eval": None}, {}, "data.eval=None: must be the path of a .jsonl, .jsonl.gz, .parquet, .csv or .csv.gz file, a folder or hub name of datasets, rows, or a list of entries like {{path: train.jsonl, name: maths}}"),
    "empty": ({}, {"train.jsonl": b""}, "train.jsonl: has no rows; data.rl needs at least one"),
    "only blank lines": ({}, {"train.jsonl": b"\n \r\n\n"}, "train.jsonl: has no rows; data.rl needs at least one"),
    "empty sft": ({"sft": "sft.jsonl"}, {"sft.jsonl": b""}, "sft.jsonl: has no rows; data.sft needs at least one"),
    "UTF-16": ({}, {"train.jsonl": "{}".encode("utf-16")}, "train.jsonl, line 1: is not UTF-8 (byte 1 of the line); save the file as UTF-8"),
    "a JSON array": ({}, {"train.jsonl": b"[\n{},\n{}]"}, "train.jsonl, line 1, column 2: is not JSON: Expecting value, at '['"),
    "no demonstration": ({"sft": "train.jsonl"}, {}, "train.jsonl, line 1: has no 'demonstration', which is what SFT imitates (set data.demonstration to the key that has it); there are: prompt, answer"),
    "the same id": ({"id": "n"}, {"train.jsonl": b'{"prompt": "a", "answer": "1", "n": 7}\n\n{"prompt": "b", "answer": "1", "n": "7"}', "test.jsonl": b'{"prompt": "c", "answer": "1", "n": 7}'}, "train.jsonl, line 3: has n='7' as train.jsonl, line 1; remove one of them, or give each another"),
    "a named source that is not there": ({"source": "orign"}, {"train.jsonl": b'{"prompt": "a", "answer": "1", "origin": "x"}', "test.jsonl": b'{"prompt": "b", "answer": "1", "origin": "x"}'}, "test.jsonl, line 1: has no 'orign'; did you mean 'origin'? Then set data.source=origin"),
    "a key that is no text": ({"prompt": 3}, {}, "data.prompt=3: must be the name of a key, as text"),
    "no key for a prompt": ({"prompt": None}, {}, "data.prompt=None: must be the name of a key, as text"),
    "empty system prompt": ({"system_prompt": " "}, {}, "data.system_prompt=' ': is empty"),
    "system prompt a number": ({"system_prompt": 3}, {}, "data.system_prompt=3: is a number; it must be a text"),
    "gzip cut off": ({}, {"train.jsonl": gzip.compress(TRAIN)[:-9]}, "data.rl=train.jsonl: cannot be read: Compressed file ended before the end-of-stream marker was reached (relative paths begin at {here})"),
    "gzip damaged": ({}, {"train.jsonl": gzip.compress(TRAIN)[:10] + b"\7" * 30}, "data.rl=train.jsonl: cannot be read: Error -3 while decompressing data: invalid block type (relative paths begin at {here})"),
    "zstd": ({}, {"train.jsonl": b"\x28\xb5\x2f\xfd and more"}, "data.rl=train.jsonl: is a zstd file, which is not read; unpack it, or pack it with gzip"),
    "a gzip bomb": ({}, {"train.jsonl": gzip.compress((b" " * (2**25 - 1) + b"\n") * 3)}, "train.jsonl: has {size} bytes and opens to 96 MiB or more, over 200 times its size; it is not read. Write it anew, uncompressed, if it is meant"),
    "a line without an end": ({}, {"train.jsonl": b"[" * (2**26 + 1)}, "train.jsonl, line 1: is longer than 64 MiB; a row is one line"),
    "an inner key that is not there": ({"answer": "reward_model.ground_thruth"}, {"test.jsonl": b'{"prompt": "a", "reward_model": {"style": "rule", "ground_truth": "1"}}'}, "test.jsonl, line 1: has no 'reward_model.ground_thruth'; did you mean 'reward_model.ground_truth'? Then set data.answer=reward_model.ground_truth"),
    "a path through a text": ({"answer": "prompt.x"}, {}, "test.jsonl, line 1: has no 'prompt.x'; did you mean 'prompt'? Then set data.answer=prompt"),
    "columns that are not there": ({"columns": ["levle"]}, {"test.jsonl": b'{"prompt": "a", "answer": "1", "level": 3}'}, "test.jsonl, line 1: has no 'levle'; did you mean 'level'? Then set data.columns=level"),
    "columns a text": ({"columns": "level"}, {}, "data.columns='level': must be a list of keys' names"),
    "too few": ({}, {"train.jsonl": TRAIN[:32]}, "data: the rl set has 1 tasks, fewer than the 2 that a step needs (rollout.batch_size / rollout.group_size)"),
    "damaged parquet": ({"rl": "t.parquet"}, {"t.parquet": b"PAR1 and no more"}, "data.rl=t.parquet: cannot be read: Parquet magic bytes not found in footer. Either the file is corrupted or this is not a parquet file. (relative paths begin at {here})"),
    "empty file called parquet": ({"rl": "t.parquet"}, {"t.parquet": b""}, "data.rl=t.parquet: cannot be read: Parquet file size is 0 bytes (relative paths begin at {here})"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_bad_file(name, files, last_line):
    settings, contents, expected = FILES[name]
    for file, content in {"train.jsonl": TRAIN, **contents}.items():
        (files / file).parent.mkdir(exist_ok=True)
        (files / file).write_bytes(content)
    size = f"{(files / 'train.jsonl').stat().st_size:,}"
    assert last_line(data=section(**settings)) == expected.format(here=files, size=size)


TEXT, LIST = pa.array(["one", "two"]), pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
BROKEN = pa.Array.from_buffers(
    pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\3\0\0\0\4\0\0\0"), pa.py_buffer(b"one\xff")]
)

# name: columns of train.parquet → the whole message after "train.parquet, "
COLUMNS: dict[str, tuple[dict, str]] = {
    "numbers": ({"prompt": [1, 2], "answer": TEXT}, f"row 1: prompt=1: is a number; {WHAT}"),
    "a null": ({"prompt": ["one", None], "answer": TEXT}, "row 2: prompt=None: is null; give it a value, or remove the row"),
    "nulls only": ({"prompt": TEXT, "answer": pa.nulls(2)}, "row 1: answer=None: is null; give it a value, or remove the row"),
    "bytes": ({"prompt": [b"one", b"two"], "answer": TEXT}, f"row 1: prompt=b'one': is of type bytes; {WHAT}"),
    "NaN": ({"prompt": TEXT, "answer": [1.0, float("nan")]}, "row 2: answer=nan: is a number, which has no JSON text; write it as a text"),
    "another name": ({"prompts": TEXT, "answer": TEXT}, "row 1: has no 'prompt'; did you mean 'prompts'? Then set data.prompt=prompts"),
    "no column": ({"a": TEXT, "b": TEXT}, "row 1: has no 'prompt', which is what the policy is asked (set data.prompt to the key that has it); there are: a, b"),
    "not UTF-8": ({"prompt": BROKEN, "answer": TEXT}, "row 2: prompt: is not UTF-8; write the file's texts as UTF-8"),
    "a message without a role": ({"messages": pa.array([[{"content": "a"}], []], LIST), "answer": TEXT}, "row 1: messages[0]={'role': None, 'content': 'a'}: has no role; " + MESSAGE),
    "no messages": ({"messages": pa.array([[{"role": "user", "content": "a"}], []], LIST), "answer": TEXT}, f"row 2: messages=[]: is an empty list; {WHAT}"),
}  # fmt: skip


@pytest.mark.parametrize("name", COLUMNS)
def test_bad_column(name, files, last_line):
    columns, expected = COLUMNS[name]
    pq.write_table(pa.table(columns), files / "train.parquet")
    assert last_line(data=section(rl="train.parquet")) == f"train.parquet, {expected}"


def test_a_parquet_file_without_rows_and_one_with_a_column_twice(files, last_line):
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), files / "train.parquet")
    assert last_line(data=section(rl="train.parquet")) == "train.parquet: has no rows; data.rl needs at least one"
    pq.write_table(pa.table([TEXT, TEXT], ["prompt", "prompt"]), files / "train.parquet")
    assert last_line(data=section(rl="train.parquet")) == "train.parquet: has two columns 'prompt'; rename one of them"


# ---- loaders in Python ------------------------------------------------------------------------------------------------


def odd_tasks(what):
    good = Task("good", ({"role": "user", "content": "hi"},), "1")
    odd = {
        "raises": lambda: {}["key"],
        "two lines": lambda: (_ for _ in ()).throw(ValueError("first\nsecond")),
        "a dict": lambda: {"role": "user"},
        "content null": lambda: Task("x", ({"role": "user", "content": None},), "1"),
        "answer a number": lambda: Task("x", good.messages, 3),
        "half a pair": lambda: Task("x", ({"role": "user", "content": "\ud800"},), "1"),
        "no id": lambda: Task("", good.messages, "1"),
        "the same id": lambda: good,
    }
    return TaskSets([], [good, odd[what]()], [good])


HERE = "data._target_=tests.bad_inputs.test_data_files.odd_tasks"
LOADERS = {
    "raises": f"{HERE} failed: KeyError: 'key' (test_data_files.py:{{line}})",
    "two lines": f"{HERE} failed: ValueError: second (test_data_files.py:{{line}})",
    "a dict": "data: the rl set holds a dict, not a hybrid_rl.types.Task",
    "content null": "data: task 'x' of the rl set: the content of message 0 is of type NoneType, not a text",
    "answer a number": "data: task 'x' of the rl set: the answer is of type int, not a text",
    "half a pair": "data: task 'x' of the rl set: the content of message 0 has half of a surrogate pair, which no tokenizer takes",
    "no id": f"{HERE} failed: ValueError: a task needs an id (types.py:{{line}})",
    "the same id": "data: task 'good' is twice in rl; ids must be unique and the sets disjoint",
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_in_python_that_fails(name, files, last_line):
    line = last_line(data={"_target_": HERE.partition("=")[2], "what": name})
    assert re.sub(r"py:\d+", "py:{line}", line) == LOADERS[name]


def test_a_loader_without_its_arguments_or_with_another_result(files, last_line):
    said = last_line(data={"_target_": "hybrid_rl.data.files.load_tasks", "rl": "train.jsonl"})
    assert said.startswith(
        "data._target_=hybrid_rl.data.files.load_tasks failed: TypeError: load_tasks() missing 1 required positional argument: 'eval'"
    )
    assert (
        last_line(data={"_target_": "builtins.dict", "a": 1})
        == "data._target_=builtins.dict returned dict, not hybrid_rl.data.TaskSets"
    )


def test_a_recipe_without_python_for_its_data(tmp_path, monkeypatch, capsys):
    """Settings are checked against the loader's arguments; then a dry run finds the tasks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_bytes(TRAIN)
    (tmp_path / "test.jsonl").write_text('{"prompt": "held out", "answer": "1"}\n')
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "mine.yaml").write_text(
        "# @package _global_\nname: mine\ndata: {_target_: hybrid_rl.data.files.load_tasks, rl: train.jsonl, eval: test.jsonl}\n"
        "reward: {_target_: tests.rewards.length}\n"
    )
    overrides = [
        "+recipe=mine",
        "rollout.batch_size=4",
        "rollout.group_size=2",
        "algo.minibatches=1",
        "sft.steps=0",
        "dry_run=true",
        "device=cpu",
    ]
    with pytest.raises(
        ConfigError, match=r"hybrid_rl\.data\.files\.load_tasks takes no such argument; did you mean prompt\?"
    ):
        load([*overrides, "+data.promt=q"], tmp_path / "conf")
    with pytest.raises(
        ConfigError,
        match=r"data\.eval=None \(command line\): is missing, and hybrid_rl\.data\.files\.load_tasks needs it",
    ):
        load([*overrides, "~data.eval"], tmp_path / "conf")
    assert stages.run(OmegaConf.to_object(load(overrides, tmp_path / "conf")), tmp_path / "run") == 0
    assert "0 SFT, 2 RL, 1 held out; prompts of " in capsys.readouterr().out


def test_arguments_of_the_chat_template(files, last_line, capsys):
    """Beside the arguments of any loader, and checked before the model loads, in a dry run too."""
    said = "data.template_arguments.enable_thinking=false: the model's chat template uses no such variable; there are: none"
    assert last_line("+data.template_arguments={enable_thinking: false}") == said
    assert last_line("+data.template_arguments.enable_thinking=false", "dry_run=true") == said
    (files / "train.jsonl").write_bytes(TRAIN)
    assert last_line(folder="again", data=section(template_arguments={"enable_thinking": False})) == said
    with pytest.raises(ConfigError, match=r"data\.template_arguments=3 \(command line\): must be a mapping"):
        load(["+recipe=reverse", "data.template_arguments=3"])
    for override in (
        "data.template_arguments={enable_thinking: false}",
        "data.template_arguments.enable_thinking=false",
    ):
        with pytest.raises(ConfigError) as raised:
            load(["+recipe=reverse", override])
        assert str(raised.value) == f"{override} (command line): there is no such key; to add it, write +{override}"


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LOOPS = {
    "always": (LOOP, "model.path=model: its chat template takes more than 1 s; repair it, or use another model"),
    "for one prompt": (
        "{% if messages[0].role == 'system' %}" + LOOP + "{% else %}{{ messages[0].content }}{% endif %}",
        "task rl/x: the chat template of model takes more than 1 s; mend it in the model's folder, or use another model",
    ),
}


@pytest.mark.parametrize("overrides", [[], ["dry_run=true"]])
@pytest.mark.parametrize("name", LOOPS)
def test_a_template_that_loops_for_ever(files, last_line, monkeypatch, overrides, name):
    monkeypatch.setattr(render, "SECONDS", 1)
    monkeypatch.setattr(tokenizer, "SECONDS", 1)
    template, said = LOOPS[name]
    tiny.create(files / "model", TinyConfig(hidden_size=32, intermediate_size=64), 0)
    (files / "model" / "chat_template.jinja").write_text(template)
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": messages, "answer": "1", "id": "x"}]
    (files / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert last_line("model.path=model", *overrides, data=section()) == said
