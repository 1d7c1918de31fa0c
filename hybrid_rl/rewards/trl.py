"""TRL's reward functions, unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from hydra.utils import get_method

from hybrid_rl.types import Task


class Trl:
    """Pay what a function of TRL's form pays: (prompts, completions, **columns) → list of numbers.

    None in the list means that it does not apply. function: its path, module.function. It gets lists, by name: prompts, completions, answer, and each key of
    task.columns. messages: whether prompts and completions are lists of {role, content}, as TRL gives them for chats;
    false: completions are texts, and a prompt is the text of its last message.
    """

    def __init__(self, function: str, messages: bool = True):
        self.function, self.messages = get_method(function), messages
        parameters = inspect.signature(self.function).parameters
        self.takes = None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else set(parameters)

    def __call__(self, completions: Sequence[str], tasks: Sequence[Task]) -> Any:
        prompts: list[Any] = [
            [dict(m) for m in t.messages] if self.messages else t.messages[-1]["content"] for t in tasks
        ]
        texts: list[Any] = [[{"role": "assistant", "content": c}] if self.messages else c for c in completions]
        names = dict.fromkeys(name for task in tasks for name in task.columns)
        given = {
            **{name: [task.columns.get(name) for task in tasks] for name in names},
            "answer": [task.answer for task in tasks],
            "prompts": prompts,
            "completions": texts,
        }
        return self.function(**{k: v for k, v in given.items() if self.takes is None or k in self.takes})
