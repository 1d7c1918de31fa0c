"""The three sets of tasks of a run, and the checks they must pass before anything is trained on them."""

from __future__ import annotations

import json
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from hybrid_rl.config import loader
from hybrid_rl.types import Task


class DataError(ValueError):
    """Tasks that cannot be used, with what to change."""


@dataclass(frozen=True, slots=True)
class TaskSets:
    """sft: demonstrations to imitate; rl: tasks to practise; eval: held out from both."""

    sft: Sequence[Task]
    rl: Sequence[Task]
    eval: Sequence[Task]
    notes: tuple[str, ...] = ()  # what a user should know of them: what was left out, and why
    dropped: Mapping[str, int] = field(default_factory=dict)  # set → its tasks that were too long

    def __post_init__(self) -> None:
        owner: dict[str, str] = {}
        for name, tasks in (("sft", self.sft), ("rl", self.rl), ("eval", self.eval)):
            for task in tasks:
                if not isinstance(task, Task):
                    raise DataError(f"data: the {name} set holds a {type(task).__name__}, not a hybrid_rl.types.Task")
                if problem := _problem(task):
                    raise DataError(f"data: task {task.id!r} of the {name} set: {problem}")
                if task.id in owner:
                    where = f"twice in {name}" if owner[task.id] == name else f"in both {owner[task.id]} and {name}"
                    raise DataError(f"data: task {task.id!r} is {where}; ids must be unique and the sets disjoint")
                owner[task.id] = name

    def without(self, dropped: Mapping[str, str]) -> TaskSets:
        """Return the sets without these tasks, id → why; the notes count them by set, source and reason."""
        if not dropped:
            return self
        kept: dict[str, list[Task]] = {}
        counts, notes = dict[str, int](), list[str]()
        for name, tasks in (("rl", self.rl), ("eval", self.eval), ("sft", self.sft)):
            kept[name] = [task for task in tasks if task.id not in dropped]
            if out := [task for task in tasks if task.id in dropped]:
                counts[name] = len(out)
                sizes, reasons = Counter(task.source for task in tasks), Counter((t.source, dropped[t.id]) for t in out)
                notes += [
                    f"dropped {count:,} of {sizes[source]:,} {name} tasks{source and f' of {source}'}: {why}"
                    for (source, why), count in sorted(reasons.items())
                ]
        return replace(self, **kept, notes=(*self.notes, *notes), dropped=counts)

    def digests(self) -> dict[str, str]:
        """Return a SHA-256 of each set by name: everything that its tasks say, in their order."""
        digests = {}
        for name, tasks in (("rl", self.rl), ("sft", self.sft), ("eval", self.eval)):
            digest = sha256()
            for task in tasks:
                said = (task.id, task.messages, task.answer, task.demonstration, task.source, task.columns)
                digest.update(json.dumps(said, sort_keys=True).encode() + b"\n")
            digests[name] = digest.hexdigest()
        return digests


def _problem(task: Task) -> str:
    """Return what the tokenizer could not take, or would take for something else.

    An answer may be any text: only the reward reads it.
    """
    texts = [(f"the content of message {i}", message["content"]) for i, message in enumerate(task.messages)]
    texts += [
        ("the answer", task.answer),
        *([("the demonstration", task.demonstration)] if task.demonstration is not None else []),
    ]
    for what, text in texts:
        if not isinstance(text, str):
            return f"{what} is of type {type(text).__name__}, not a text"
        if what != "the answer" and surrogates(text):
            return f"{what} has half of a surrogate pair, which no tokenizer takes"
    if task.columns:
        try:
            json.dumps(task.columns, sort_keys=True)
        except (TypeError, ValueError, RecursionError) as error:
            return f"its columns are not values that JSON can hold ({str(error).splitlines()[0]})"
    return ""


def surrogates(text: str) -> bool:
    """Return whether a text holds half of a surrogate pair (\\ud800 to \\udfff): UTF-8 has no bytes for it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def load_task_sets(config: dict[str, Any], *, rl_tasks: int, sft_tasks: int) -> TaskSets:
    """Call the recipe's loader.

    Raises DataError if it fails, and for a set smaller than what one step draws from it (0: set unused).
    """
    try:
        sets = instantiate(loader(config), _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        raise (
            cause
            if isinstance(cause, DataError)
            else DataError(f"data._target_={config['_target_']} failed: {told(cause)}")
        ) from error
    if not isinstance(sets, TaskSets):
        raise DataError(
            f"data._target_={config['_target_']} returned {type(sets).__name__}, not hybrid_rl.data.TaskSets"
        )
    check_sizes(sets, rl_tasks, sft_tasks)
    if sft_tasks and (bare := next((t for t in sets.sft if t.demonstration is None), None)):
        raise DataError(f"data: task {bare.id!r} of the sft set has no demonstration; give it one or set sft.steps=0")
    return sets


def check_sizes(sets: TaskSets, rl_tasks: int, sft_tasks: int) -> None:
    """Raise DataError for a set smaller than what one step draws from it (0: set unused)."""
    for name, tasks, needed, key in (
        ("rl", sets.rl, rl_tasks, "rollout.batch_size / rollout.group_size"),
        ("sft", sets.sft, sft_tasks, "sft.batch_size"),
        ("eval", sets.eval, 1, "1"),
    ):
        if len(tasks) < needed:
            raise DataError(
                f"data: the {name} set has {len(tasks)} tasks, fewer than the {needed} that a step needs ({key})"
                + "".join(f"; {note}" for note in sets.notes if name in sets.dropped)
            )


def told(error: BaseException) -> str:
    """Return a loader's own error in one line, with the place in the code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1]} ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
