"""Tasks from data of your own: files, Hugging Face datasets, Python functions and mixtures of them.

    data: {_target_: hybrid_rl.data.files.load_tasks, rl: train.jsonl, eval: test.jsonl}

Every text is taken as it is, character for character, and is never normalised.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import Any, Literal, NoReturn

from hybrid_rl.data.rows import Row, clip, kind_of, short
from hybrid_rl.data.sources import Source, sources
from hybrid_rl.data.tasks import DataError, TaskSets, surrogates
from hybrid_rl.types import Task

ROLES = ("system", "developer", "user", "assistant", "tool")
Messages = tuple[dict[str, str], ...]


@dataclass(frozen=True, slots=True)
class Mapping:
    """Which key of a row is what; see load_tasks."""

    prompt: str = "prompt"
    answer: str | None = "answer"
    demonstration: str = "demonstration"
    id: str = "id"
    source: str = "source"
    system_prompt: str | None = None
    columns: Sequence[str] | None = None

    def check(self, setting: str) -> None:
        """Raise DataError for a value that names no key."""
        for name in KEYS:
            key = getattr(self, name)
            if not isinstance(key, str) and (name, key) != ("answer", None):
                raise DataError(f"{setting}.{name}={key!r}: must be the name of a key, as text")
        columns = self.columns
        if columns is not None and (isinstance(columns, str) or not all(isinstance(name, str) for name in columns)):
            raise DataError(f"{setting}.columns={columns!r}: must be a list of keys' names")
        if self.system_prompt is not None and (problem := _text_problem(self.system_prompt)):
            raise DataError(f"{setting}.system_prompt={short(self.system_prompt)}: {problem}")

    def read(self) -> list[str]:
        """Return every key that may be read of a row."""
        keys = [getattr(self, name) for name in KEYS]
        return [key for key in (*keys, "messages", *(self.columns or [])) if key is not None]


KEYS = ("prompt", "answer", "demonstration", "id", "source")


def load_tasks(
    rl: Any,
    eval: Any,
    sft: Any = None,
    prompt: str = "prompt",
    answer: str | None = "answer",
    demonstration: str = "demonstration",
    id: str = "id",
    source: str = "source",
    system_prompt: str | None = None,
    columns: Sequence[str] | None = None,
    duplicates: Literal["refuse", "drop"] = "refuse",
) -> TaskSets:
    """Return the tasks of each set, from one source or a list of them.

    Relative paths begin where the command runs. A source is a .jsonl, .csv or .parquet file, a folder or hub name of Hugging Face datasets (nothing is downloaded),
    rows that a Python function returned ({_target_: my_data.rows}), or an entry with more to say: {path or rows,
    subset, split, take (the first so many tasks), name (the source that its tasks are of)}, and any of the following
    for it alone. `prompt` … `source` name the keys (or columns) of a row, inner ones by a path with dots
    (answer=reward_model.ground_truth):

    - prompt: a text, which becomes one user message, or a list of {role, content}. A row without it may have the list
      under `messages`.
    - answer: what the reward compares with. A text is taken as it is, any other value as its JSON text. answer=null:
      there is none, "".
    - demonstration: what SFT imitates; each row of the sft file must have one.
    - id: a text or a whole number, unique in its source; by default a hash of prompt and answer. The task's id is
      rl/<id>, eval/<id>, sft/<id>, with the name of its source before the row's own id.
    - source: where the task is from; evaluations then also report each source.
    - columns: which other keys a task keeps, as task.columns, for the reward; by default all but those that hold bytes.

    `system_prompt` goes before every prompt that does not begin with a system message. A prompt of the eval set may be
    in no other set, and a task in a set once; duplicates="drop" leaves out the later one, and counts it.

    Raises DataError, in one line, with file, line (or row), key, value and what to do.
    """
    base = Mapping(prompt, answer, demonstration, id, source, system_prompt, columns)
    base.check("data")
    sets: dict[str, list[Task]] = {"sft": [], "rl": [], "eval": []}
    held_out: dict[bytes, str] = {}
    dropped: Counter[str] = Counter()
    for name, given in (("eval", eval), ("rl", rl), ("sft", sft)):
        if given is None and name == "sft":
            continue
        places: dict[str, str] = {}
        found = sources(name, given, asdict(base))
        for place, own, task in _tasks(name, found, base):
            digest = sha256(json.dumps(task.messages).encode()).digest()
            problem = ""
            if (first := places.setdefault(task.id, place)) != place:
                problem = (
                    f"has {own} as {first}; remove one of them, or give each another"
                    if own
                    else f"has the same prompt and answer as {first}; remove one of them, give each an {id!r} of its own, "
                    "or set data.duplicates=drop"
                )
            elif name == "eval":
                held_out.setdefault(digest, place)
            elif digest in held_out:
                problem = (
                    f"has the prompt of {held_out[digest]}; what evaluations measure must not be trained on: remove one, "
                    "or set data.duplicates=drop"
                )
            if problem and (duplicates == "refuse" or (own and first != place)):
                raise DataError(f"{place}: {problem}")
            if problem:
                dropped[
                    f"{name} tasks that are there twice" if first != place else f"{name} tasks whose prompt is held out"
                ] += 1
            else:
                sets[name].append(task)
        if not sets[name]:
            where = ", ".join(source.where for source in found)
            raise DataError(f"{where}: has no rows; data.{name} needs at least one")
    notes = tuple(f"left out {count:,} {what}" for what, count in dropped.items())
    return TaskSets(sets["sft"], sets["rl"], sets["eval"], notes)


def _tasks(name: str, found: Sequence[Source], base: Mapping) -> Iterator[tuple[str, str, Task]]:
    """Yield (place with its file, what the row has as its own id or "", task) of every row of a set."""
    for source in found:
        mapping = replace(base, **source.mapping)
        mapping.check(f"data.{name}")
        rows = source.read(mapping.read(), mapping.columns is None)
        for count, (place, row, unread) in enumerate(rows):
            if count == source.take:
                break
            reader = _Reader(source.where, place, row, unread, mapping)
            id = reader.label("id")
            own = "" if id is None else f"{mapping.id}={id!r}"
            yield f"{source.where}, {place}", own, reader.task(name, id, source.name)


class _Reader:
    """One row of a source to a task; what is wrong with it is raised with its place."""

    def __init__(self, where: str, place: str, row: Row, unread: Sequence[str], mapping: Mapping):
        self.where, self.place, self.row, self.unread, self.mapping = where, place, row, unread, mapping

    def task(self, set_name: str, id: str | None, source: str | None) -> Task:
        messages = self._messages()
        answer = self._answer()
        demonstration = self._text("demonstration", wanted=set_name == "sft")
        if id is None:
            id = sha256(json.dumps([messages, answer]).encode()).hexdigest()[:16]
        elif source is not None:
            id = f"{source}/{id}"
        source = (self.label("source") or "") if source is None else source
        return Task(f"{set_name}/{id}", messages, answer, demonstration, source, self._columns())

    def _messages(self) -> Messages:
        key = str(self.mapping.prompt)
        if find(self.row, key) is None and self.row.get("messages") is not None:
            key = "messages"
        value = self._value("prompt", wanted=True) if key != "messages" else self.row["messages"]
        if isinstance(value, str) and key == self.mapping.prompt:
            messages = [{"role": "user", "content": value}]
            if problem := _text_problem(value):
                self._refuse(key, value, problem)
        elif isinstance(value, list) and value:
            messages = [self._message(f"{key}[{i}]", message) for i, message in enumerate(value)]
        else:
            self._refuse(key, value, f"is {kind_of(value)}; it must be a text, or a list of messages like {EXAMPLE}")
        if messages[-1]["role"] == "assistant":
            last = f"{key}[{len(messages) - 1}].role"
            self._refuse(
                last, "assistant", "is the last message, and the policy is to answer; move it to 'demonstration'"
            )
        if self.mapping.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.mapping.system_prompt})
        return tuple(messages)

    def _message(self, key: str, message: Any) -> dict[str, str]:
        if not isinstance(message, dict):
            self._refuse(key, message, f"is {kind_of(message)}; a message is {EXAMPLE[1:-1]}")
        for part in ("role", "content"):
            if message.get(part) is None:
                self._refuse(key, message, f"has no {part}; a message is {EXAMPLE[1:-1]}")
        if extra := sorted(
            str(k) for k, value in message.items() if k not in ("role", "content") and value not in NOTHING
        ):
            self._refuse(
                f"{key}.{extra[0]}", message[extra[0]], "is not supported; a message has role and content only"
            )
        if message["role"] not in ROLES:
            self._refuse(f"{key}.role", message["role"], f"must be one of {', '.join(ROLES)}")
        if problem := _text_problem(message["content"]):
            self._refuse(f"{key}.content", message["content"], problem)
        return {"role": message["role"], "content": message["content"]}

    def _answer(self) -> str:
        if self.mapping.answer is None:
            return ""
        value = self._value("answer", wanted=True)
        try:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            self._refuse(self.mapping.answer, value, f"is {kind_of(value)}, which has no JSON text; write it as a text")
        if surrogates(text):
            self._refuse(self.mapping.answer, text, SURROGATE)
        return text

    def _text(self, name: str, wanted: bool = False) -> str | None:
        value = self._value(name, wanted)
        if value is not None and (problem := _text_problem(value)):
            self._refuse(getattr(self.mapping, name), value, problem)
        return value

    def label(self, name: str) -> str | None:
        """Return a short text that reports and messages show in a line: an id or a source."""
        value = self._value(
            name, wanted=getattr(self.mapping, name) != name
        )  # a key that was named on purpose must be there
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if value is not None and (problem := _text_problem(value)):
            self._refuse(getattr(self.mapping, name), value, problem)
        if value is not None and any(ord(c) < 32 or c in "\x7f\x85\u2028\u2029" for c in value):
            self._refuse(getattr(self.mapping, name), value, "must be one line without control characters")
        return value

    def _value(self, name: str, wanted: bool) -> Any:
        """Return the row's value; null is the same as none."""
        key = str(getattr(self.mapping, name))
        value = find(self.row, key)
        if value is None and wanted:
            if key in self.row and name != "demonstration":
                self._refuse(key, value, "is null; give it a value, or remove the row")
            self._absent(key, f"data.{name}", WHAT[name])
        return value

    def _absent(self, key: str, setting: str, what: str) -> NoReturn:
        top = [*self.row, *self.unread]
        near = difflib.get_close_matches(key, [*top, *_inner(self.row)], n=1, cutoff=0.6)
        hint = (
            f"; did you mean {near[0]!r}? Then set {setting}={near[0]}"
            if near and near[0] != key
            else f", which is {what}"
        )
        there = "" if near else f"; there are: {clip(', '.join(top))}" if top else "; the row is empty"
        raise DataError(f"{self.where}, {self.place}: has no {key!r}{hint}{there}")

    def _columns(self) -> Row:
        """Return what the task keeps beside its own fields, for the reward."""
        if self.mapping.columns is None:
            used = {
                *(getattr(self.mapping, name) for name in KEYS),
                *(["messages"] if find(self.row, str(self.mapping.prompt)) is None else []),
            }
            return {key: value for key, value in self.row.items() if key not in used}
        for key in self.mapping.columns:
            if not _is_there(self.row, key):
                self._absent(key, "data.columns", "named in data.columns")
        return {key: find(self.row, key) for key in self.mapping.columns}

    def _refuse(self, key: str | None, value: Any, problem: str) -> NoReturn:
        raise DataError(f"{self.where}, {self.place}: {key}={short(value)}: {problem}")


NOTHING: tuple[Any, ...] = (None, "", [], {})  # what a message's other keys may be: some writers fill them in
EXAMPLE = "[{'role': 'user', 'content': '…'}]"
SURROGATE = "has half of a surrogate pair, which is no character; escape both halves, or write the character itself"
WHAT = {
    "prompt": "what the policy is asked (set data.prompt to the key that has it)",
    "answer": "what the reward compares with (set data.answer to the key that has it; answer=null if there is none)",
    "demonstration": "what SFT imitates (set data.demonstration to the key that has it)",
    "id": "what data.id names",
    "source": "what data.source names",
}


# ---- values ----------------------------------------------------------------------------------------------------------


def _text_problem(value: Any) -> str:
    """Return what keeps a value from being a text to work with, or ""."""
    if not isinstance(value, str):
        return f"is {kind_of(value)}; it must be a text"
    if not value.strip():
        return "is empty"
    return SURROGATE if surrogates(value) else ""


def find(row: Row, key: str) -> Any:
    """Return a row's value under a key, or under a path of keys with dots; None if there is none."""
    if key in row or "." not in key:
        return row.get(key)
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _is_there(row: Row, key: str) -> bool:
    first, _, rest = key.partition(".")
    return key in row or bool(rest and isinstance(row.get(first), dict) and _is_there(row[first], rest))


def _inner(row: Row, prefix: str = "") -> Iterator[str]:
    """Yield the paths of keys inside a row's objects."""
    for key, value in row.items():
        if prefix:
            yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _inner(value, f"{prefix}{key}.")
