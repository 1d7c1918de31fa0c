"""Tasks from files of your own, .jsonl or .parquet: a recipe then needs no Python for its data.

    data: {_target_: hybrid_rl.data.files.load_tasks, rl: train.jsonl, eval: test.jsonl}

Every text is taken as it is, character for character, and is never normalised.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from hybrid_rl.data.tasks import DataError, TaskSets, surrogates
from hybrid_rl.types import Task

ROLES = ("system", "developer", "user", "assistant", "tool")
BATCH = 1000  # rows of a parquet file that are Python objects at a time
Row = dict[str, Any]
Messages = tuple[dict[str, str], ...]


def load_tasks(
    rl: str, eval: str, sft: str | None = None, prompt: str = "prompt", answer: str | None = "answer",
    demonstration: str = "demonstration", id: str = "id", source: str = "source", system_prompt: str | None = None,
) -> TaskSets:  # fmt: skip
    """One file a set; relative paths are relative to where the command runs. `prompt` … `source` name the keys (or columns) of a row:

    - prompt: a text, which becomes one user message, or a list of {role, content}. A row without it may have the list under `messages`.
    - answer: what the reward compares with. A text is taken as it is, any other value as its JSON text. answer=null: there is none, "".
    - demonstration: what SFT imitates; each row of the sft file must have one.
    - id: a text or a whole number, unique in its file; by default a hash of prompt and answer. The task's id is rl/<id>, eval/<id>, sft/<id>.
    - source: where the task is from; evaluations then also report each source.

    `system_prompt` goes before every prompt that does not begin with a system message. A prompt of the eval file may be in no other file.

    Raises DataError, in one line, with file, line (or row), key, value and what to do.
    """
    keys = {"prompt": prompt, "answer": answer, "demonstration": demonstration, "id": id, "source": source}
    if bad := next((f"{name}={key!r}" for name, key in keys.items() if not isinstance(key, str) and (name, key) != ("answer", None)), None):
        raise DataError(f"data.{bad}: must be the name of a key, as text")
    if system_prompt is not None and (problem := _text_problem(system_prompt)):
        raise DataError(f"data.system_prompt={_short(system_prompt)}: {problem}")
    sets: dict[str, list[Task]] = {"sft": [], "rl": [], "eval": []}
    held_out: dict[bytes, str] = {}
    for name, given in (("eval", eval), ("rl", rl), ("sft", sft)):
        if given is None and name == "sft":
            continue
        if not isinstance(given, str):
            raise DataError(f"data.{name}={given!r}: must be the path of a .jsonl or .parquet file")
        places: dict[str, str] = {}
        for place, row in _rows(name, Path(given), [key for key in (*keys.values(), "messages") if key is not None]):
            task = _Reader(Path(given), place, row, keys, system_prompt).task(name)
            if (first := places.setdefault(task.id, place)) != place:
                own = f"{id}={task.id.partition('/')[2]!r}" if row.get(id) is not None else "the same prompt and answer"
                raise DataError(f"{given}, {place}: has {own} as {first}; remove one of them, or give each an {id!r} of its own")
            digest = sha256(json.dumps(task.messages).encode()).digest()
            if name == "eval":
                held_out.setdefault(digest, place)
            elif digest in held_out:
                raise DataError(
                    f"{given}, {place}: has the prompt of {eval}, {held_out[digest]}; what evaluations measure must not be trained on: remove one"
                )
            sets[name].append(task)
        if not sets[name]:
            raise DataError(f"{given}: has no rows; data.{name} needs at least one")
    return TaskSets(**sets)


class _Reader:
    """One row of a file to a task; what is wrong with it is raised with its place."""

    def __init__(self, path: Path, place: str, row: Row, keys: Mapping[str, str | None], system_prompt: str | None):
        self.path, self.place, self.row, self.keys, self.system_prompt = path, place, row, keys, system_prompt

    def task(self, name: str) -> Task:
        messages = self._messages()
        answer = self._answer()
        demonstration = self._text("demonstration", wanted=name == "sft")
        source = self._label("source") or ""
        id = self._label("id") or sha256(json.dumps([messages, answer]).encode()).hexdigest()[:16]
        return Task(f"{name}/{id}", messages, answer, demonstration, source)

    def _messages(self) -> Messages:
        key = str(self.keys["prompt"])
        if self.row.get(key) is None and self.row.get("messages") is not None:
            key = "messages"
        value = self._value("prompt", wanted=True) if key != "messages" else self.row["messages"]
        if isinstance(value, str) and key == self.keys["prompt"]:
            messages = [{"role": "user", "content": value}]
            if problem := _text_problem(value):
                self._refuse(key, value, problem)
        elif isinstance(value, list) and value:
            messages = [self._message(f"{key}[{i}]", message) for i, message in enumerate(value)]
        else:
            self._refuse(key, value, f"is {_kind(value)}; it must be a text, or a list of messages like {EXAMPLE}")
        if messages[-1]["role"] == "assistant":
            last = f"{key}[{len(messages) - 1}].role"
            self._refuse(last, "assistant", "is the last message, and the policy is to answer; move it to 'demonstration'")
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return tuple(messages)

    def _message(self, key: str, message: Any) -> dict[str, str]:
        if not isinstance(message, dict):
            self._refuse(key, message, f"is {_kind(message)}; a message is {EXAMPLE[1:-1]}")
        for part in ("role", "content"):
            if message.get(part) is None:
                self._refuse(key, message, f"has no {part}; a message is {EXAMPLE[1:-1]}")
        if extra := sorted(str(k) for k, value in message.items() if k not in ("role", "content") and value is not None):
            self._refuse(f"{key}.{extra[0]}", message[extra[0]], "is not supported; a message has role and content only")
        if message["role"] not in ROLES:
            self._refuse(f"{key}.role", message["role"], f"must be one of {', '.join(ROLES)}")
        if problem := _text_problem(message["content"]):
            self._refuse(f"{key}.content", message["content"], problem)
        return {"role": message["role"], "content": message["content"]}

    def _answer(self) -> str:
        if self.keys["answer"] is None:
            return ""
        value = self._value("answer", wanted=True)
        try:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            self._refuse(self.keys["answer"], value, f"is {_kind(value)}, which has no JSON text; write it as a text")
        if surrogates(text):
            self._refuse(self.keys["answer"], text, SURROGATE)
        return text

    def _text(self, name: str, wanted: bool = False) -> str | None:
        value = self._value(name, wanted)
        if value is not None and (problem := _text_problem(value)):
            self._refuse(self.keys[name], value, problem)
        return value

    def _label(self, name: str) -> str | None:
        """A short text that reports and messages show in a line: an id or a source."""
        value = self._value(name, wanted=self.keys[name] != name)  # a key that was named on purpose must be there
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if value is not None and (problem := _text_problem(value)):
            self._refuse(self.keys[name], value, problem)
        if value is not None and any(ord(c) < 32 or c in "\x7f\x85\u2028\u2029" for c in value):
            self._refuse(self.keys[name], value, "must be one line without control characters")
        return value

    def _value(self, name: str, wanted: bool) -> Any:
        """The row's value, where null is the same as none."""
        key = str(self.keys[name])
        value = self.row.get(key)
        if value is None and wanted:
            if key in self.row and name != "demonstration":
                self._refuse(key, value, "is null; give it a value, or remove the row")
            near = difflib.get_close_matches(str(key), [str(k) for k in self.row], n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]!r}? Then set data.{name}={near[0]}" if near and near[0] != key else f", which is {WHAT[name]}"
            there = "" if near else f"; there are: {_clip(', '.join(map(str, self.row)))}" if self.row else "; the row is empty"
            raise DataError(f"{self.path}, {self.place}: has no {key!r}{hint}{there}")
        return value

    def _refuse(self, key: str | None, value: Any, problem: str) -> NoReturn:
        raise DataError(f"{self.path}, {self.place}: {key}={_short(value)}: {problem}")


EXAMPLE = "[{'role': 'user', 'content': '…'}]"
SURROGATE = "has half of a surrogate pair, which is no character; escape both halves, or write the character itself"
WHAT = {
    "prompt": "what the policy is asked (set data.prompt to the key that has it)",
    "answer": "what the reward compares with (set data.answer to the key that has it; answer=null where there is none)",
    "demonstration": "what SFT imitates (set data.demonstration to the key that has it)",
    "id": "what data.id names",
    "source": "what data.source names",
}


# ---- rows -------------------------------------------------------------------------------------------------------------


def _rows(name: str, path: Path, keys: list[str]) -> Iterator[tuple[str, Row]]:
    """(where it stands, row), one at a time."""
    readers = {".jsonl": _json_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise DataError(f"data.{name}={path}: must be a file that ends in .jsonl (one JSON object a line) or .parquet")
    try:
        yield from readers[path.suffix](path, keys)
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        reason = getattr(error, "strerror", None) or str(error).strip().splitlines()[0]
        raise DataError(f"data.{name}={path}: cannot be read: {reason} (relative paths begin at {Path.cwd()})") from error


def _json_rows(path: Path, keys: list[str]) -> Iterator[tuple[str, Row]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # the mark some editors put before UTF-8
            if line.strip():
                yield f"line {number}", _object(f"{path}, line {number}", line)


def _object(where: str, line: bytes) -> Row:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8") from error
    try:
        row = DECODER.decode(text.strip(" \t\r\n"))
    except json.JSONDecodeError as error:
        start = max(0, error.pos - 20)
        raise DataError(f"{where}, column {error.colno}: is not JSON: {error.msg}, at {text[start : error.pos + 20].strip()!r}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: is not JSON that can be read: {_clip(str(error).splitlines()[0])}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: is {_kind(row)} ({_short(row)}); each line must be one JSON object, like {{'prompt': …, 'answer': …}}")
    return row


def _parquet_rows(path: Path, keys: list[str]) -> Iterator[tuple[str, Row]]:
    """Only the columns that are asked for are read; the others' names come with null, so that a message can name them."""
    with pq.ParquetFile(path) as file:
        names, number = file.schema_arrow.names, 0
        if doubled := next((name for name in names if names.count(name) > 1), None):
            raise DataError(f"{path}: has two columns {doubled!r}; rename one of them")
        wanted = [name for name in names if name in keys]
        others = dict.fromkeys(name for name in names if name not in keys)
        if not wanted and file.metadata.num_rows:
            yield "row 1", others  # in which nothing is found
        for batch in file.iter_batches(BATCH, columns=wanted):
            for row in _python(path, batch, number):
                number += 1
                yield f"row {number}", {**row, **others}


def _python(path: Path, batch: pa.RecordBatch, before: int) -> list[Row]:
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        for i in range(batch.num_rows):
            for name in batch.schema.names:
                try:
                    batch.column(name)[i].as_py()
                except UnicodeDecodeError as error:
                    raise DataError(f"{path}, row {before + i + 1}: {name}: is not UTF-8; write the file's texts as UTF-8") from error
        raise


def _once(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        doubled = next(key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1)
        raise ValueError(f"the key {doubled!r} is there twice")
    return row


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON's")


DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_no_number)


# ---- values -----------------------------------------------------------------------------------------------------------


def _text_problem(value: Any) -> str:
    """What keeps a value from being a text to work with; "" where nothing does."""
    if not isinstance(value, str):
        return f"is {_kind(value)}; it must be a text"
    if not value.strip():
        return "is empty"
    return SURROGATE if surrogates(value) else ""


def _kind(value: Any) -> str:
    return "an empty list" if value == [] else KINDS.get(type(value), f"of type {type(value).__name__}")


NUMBER = "a number"
KINDS = {type(None): "null", bool: "true or false", int: NUMBER, float: NUMBER, str: "a text", list: "a list", dict: "an object"}


def _short(value: Any) -> str:
    return _clip(repr(value))


def _clip(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
