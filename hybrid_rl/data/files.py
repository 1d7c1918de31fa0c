"""Tasks from files of your own, .jsonl (also packed by gzip) or .parquet: a recipe then needs no Python for its data.

    data: {_target_: hybrid_rl.data.files.load_tasks, rl: train.jsonl, eval: test.jsonl}

Every text is taken as it is, character for character, and is never normalised.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

from hybrid_rl.data.rows import Row, clip, kind_of, read_rows, short
from hybrid_rl.data.tasks import DataError, TaskSets, surrogates
from hybrid_rl.types import Task

ROLES = ("system", "developer", "user", "assistant", "tool")
Messages = tuple[dict[str, str], ...]


def load_tasks(
    rl: str,
    eval: str,
    sft: str | None = None,
    prompt: str = "prompt",
    answer: str | None = "answer",
    demonstration: str = "demonstration",
    id: str = "id",
    source: str = "source",
    system_prompt: str | None = None,
    columns: Sequence[str] | None = None,
) -> TaskSets:
    """Read one file a set; relative paths are relative to where the command runs. `prompt` … `source` name the keys (or columns) of a row,
    inner ones by a path with dots (answer=reward_model.ground_truth):

    - prompt: a text, which becomes one user message, or a list of {role, content}. A row without it may have the list under `messages`.
    - answer: what the reward compares with. A text is taken as it is, any other value as its JSON text. answer=null: there is none, "".
    - demonstration: what SFT imitates; each row of the sft file must have one.
    - id: a text or a whole number, unique in its file; by default a hash of prompt and answer. The task's id is rl/<id>, eval/<id>, sft/<id>.
    - source: where the task is from; evaluations then also report each source.
    - columns: which other keys a task keeps, as task.columns, for the reward; by default all but those that hold bytes.

    `system_prompt` goes before every prompt that does not begin with a system message. A prompt of the eval file may be in no other file.

    Raises DataError, in one line, with file, line (or row), key, value and what to do.
    """
    keys = {"prompt": prompt, "answer": answer, "demonstration": demonstration, "id": id, "source": source}
    if bad := next(
        (
            f"{name}={key!r}"
            for name, key in keys.items()
            if not isinstance(key, str) and (name, key) != ("answer", None)
        ),
        None,
    ):
        raise DataError(f"data.{bad}: must be the name of a key, as text")
    if columns is not None and (isinstance(columns, str) or not all(isinstance(name, str) for name in columns)):
        raise DataError(f"data.columns={columns!r}: must be a list of keys' names")
    if system_prompt is not None and (problem := _text_problem(system_prompt)):
        raise DataError(f"data.system_prompt={short(system_prompt)}: {problem}")
    sets: dict[str, list[Task]] = {"sft": [], "rl": [], "eval": []}
    held_out: dict[bytes, str] = {}
    for name, given in (("eval", eval), ("rl", rl), ("sft", sft)):
        if given is None and name == "sft":
            continue
        if not isinstance(given, str):
            raise DataError(f"data.{name}={given!r}: must be the path of a .jsonl or .parquet file")
        places: dict[str, str] = {}
        read = [key for key in (*keys.values(), "messages", *(columns or [])) if key is not None]
        for place, row, unread in read_rows(name, Path(given), read, every=columns is None):
            task = _Reader(Path(given), place, row, unread, keys, columns, system_prompt).task(name)
            if (first := places.setdefault(task.id, place)) != place:
                own = (
                    f"{id}={task.id.partition('/')[2]!r}" if find(row, id) is not None else "the same prompt and answer"
                )
                raise DataError(
                    f"{given}, {place}: has {own} as {first}; remove one of them, or give each an {id!r} of its own"
                )
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

    def __init__(
        self,
        path: Path,
        place: str,
        row: Row,
        unread: Sequence[str],
        keys: Mapping[str, str | None],
        columns: Sequence[str] | None,
        system_prompt: str | None,
    ):
        self.path, self.place, self.row, self.unread = path, place, row, unread
        self.keys, self.columns, self.system_prompt = keys, columns, system_prompt

    def task(self, name: str) -> Task:
        messages = self._messages()
        answer = self._answer()
        demonstration = self._text("demonstration", wanted=name == "sft")
        source = self._label("source") or ""
        id = self._label("id") or sha256(json.dumps([messages, answer]).encode()).hexdigest()[:16]
        return Task(f"{name}/{id}", messages, answer, demonstration, source, self._columns())

    def _messages(self) -> Messages:
        key = str(self.keys["prompt"])
        if find(self.row, key) is None and self.row.get("messages") is not None:
            key = "messages"
        value = self._value("prompt", wanted=True) if key != "messages" else self.row["messages"]
        if isinstance(value, str) and key == self.keys["prompt"]:
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
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
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
        if self.keys["answer"] is None:
            return ""
        value = self._value("answer", wanted=True)
        try:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            self._refuse(self.keys["answer"], value, f"is {kind_of(value)}, which has no JSON text; write it as a text")
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
        raise DataError(f"{self.path}, {self.place}: has no {key!r}{hint}{there}")

    def _columns(self) -> Row:
        """Return what the task keeps beside its own fields, for the reward."""
        if self.columns is None:
            used = {*self.keys.values(), *(["messages"] if find(self.row, str(self.keys["prompt"])) is None else [])}
            return {key: value for key, value in self.row.items() if key not in used}
        for key in self.columns:
            if not _is_there(self.row, key):
                self._absent(key, "data.columns", "named in data.columns")
        return {key: find(self.row, key) for key in self.columns}

    def _refuse(self, key: str | None, value: Any, problem: str) -> NoReturn:
        raise DataError(f"{self.path}, {self.place}: {key}={short(value)}: {problem}")


NOTHING: tuple[Any, ...] = (None, "", [], {})  # what a message's other keys may be: some writers fill them in
EXAMPLE = "[{'role': 'user', 'content': '…'}]"
SURROGATE = "has half of a surrogate pair, which is no character; escape both halves, or write the character itself"
WHAT = {
    "prompt": "what the policy is asked (set data.prompt to the key that has it)",
    "answer": "what the reward compares with (set data.answer to the key that has it; answer=null where there is none)",
    "demonstration": "what SFT imitates (set data.demonstration to the key that has it)",
    "id": "what data.id names",
    "source": "what data.source names",
}


# ---- values -----------------------------------------------------------------------------------------------------------


def _text_problem(value: Any) -> str:
    """What keeps a value from being a text to work with; "" where nothing does."""
    if not isinstance(value, str):
        return f"is {kind_of(value)}; it must be a text"
    if not value.strip():
        return "is empty"
    return SURROGATE if surrogates(value) else ""


def find(row: Row, key: str) -> Any:
    """Return a row's value under a key, or under a path of keys with dots; None where there is none."""
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
