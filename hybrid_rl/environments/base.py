"""What an environment's `step` may return.

An environment is a class; each object holds one conversation:

    class Guess:
        def reset(self, task):              # called first
            self.number = int(task.answer)

        def step(self, completion):         # what the policy said; may be async
            if completion.strip() == str(self.number):
                return Done(1.0)            # it is over, and pays 1
            return "wrong, try again"       # a user message; the policy answers again

Objects live in worker processes. When one is lost with its process, a new one is reset and given the same completions
again, so a step must depend on nothing but the task and what was said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.utils import get_object

Message = Mapping[str, str]  # {"role": …, "content": …}


@dataclass(frozen=True, slots=True)
class Reply:
    """Messages after which the policy answers again: a text (of the user), a message, or several.

    `reward` is paid for this turn. It is what a reward function may return: a number, {part: number}, or a pair of
    either with {measure: number}; the conversation's reward is the sum.
    """

    messages: str | Message | Sequence[Message]
    reward: Any = None


@dataclass(frozen=True, slots=True)
class Done:
    """The end of the conversation, and what its last turn is paid; None: only what `reward` and earlier turns pay.

    `measures` are logged and not paid.
    """

    reward: Any = None
    measures: Mapping[str, float] = field(default_factory=dict)


def messages_of(said: object) -> tuple[dict[str, str], ...]:
    """Return a text, a message or a sequence of messages as messages. Raises TypeError for anything else."""
    if isinstance(said, str):
        return ({"role": "user", "content": said},)
    each = [said] if isinstance(said, Mapping) else said
    if not isinstance(each, Sequence) or not each:
        raise TypeError(f"step() returned {type(said).__name__}: return a text, messages, Reply or Done")
    for message in each:
        if (
            not isinstance(message, Mapping)
            or set(message) != {"role", "content"}
            or not all(isinstance(text, str) for text in message.values())
        ):
            raise TypeError("a message of step() must be {role, content}, both texts")
        if message["role"] == "assistant":
            raise TypeError("a message of step() has the role assistant, in which only the policy speaks")
    return tuple(dict(message) for message in each)


@dataclass(frozen=True, slots=True)
class Facts:
    """What an environment's class says of itself: the role of its replies, and the tools that a chat template shows."""

    role: str = "user"
    tools: Sequence[dict[str, Any]] = ()


def facts_of(section: Mapping[str, Any]) -> Facts:
    """Return the facts of the class that the settings `environment` name.

    The role is its argument or attribute `role`; the tools are what its static method `tools` returns for its arguments.
    Raises what the class or its module raises.
    """
    arguments = {key: value for key, value in section.items() if key != "_target_"}
    found = get_object(section["_target_"])
    tools = found.tools(**arguments) if callable(getattr(found, "tools", None)) else ()
    return Facts(str(arguments.get("role") or getattr(found, "role", "user")), tools)
