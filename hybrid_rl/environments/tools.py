"""Tools: Python functions that the policy calls while it answers. Their results are messages of the role `tool`."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from hydra.utils import get_method

from hybrid_rl.environments.base import Done, Reply
from hybrid_rl.types import Task

MOST = 2000  # characters of a result that the policy sees
Call = tuple[str, dict[str, Any]]


class Tools:
    """Let the policy call functions until it answers without a call; then the conversation is over.

    functions: paths of functions with type hints and a Google-style docstring, from which the chat template's description
    is made. format: how the model writes a call: `hermes` (Qwen, SmolLM, Hermes: <tool_call>{…}</tool_call>), `llama`
    ({"name": …, "parameters": …}, perhaps after <|python_tag|>), `mistral` ([TOOL_CALLS] [{…}, …]). role: of the results.
    shown: whether the chat template describes the functions.

    A call that cannot be read, names no function, or raises is answered with the error. Nothing is paid: `reward` scores
    the last answer. Measures: tool_calls and tool_errors of a conversation.
    """

    role = "tool"

    def __init__(
        self,
        functions: Sequence[str],
        format: Literal["hermes", "llama", "mistral"] = "hermes",
        role: str = "tool",
        shown: bool = True,
    ):
        self.functions: dict[str, Callable[..., Any]] = {
            path.rpartition(".")[2]: get_method(path) for path in functions
        }
        self.read, self.role = READERS[format], role
        self.calls = self.errors = 0

    @staticmethod
    def tools(functions: Sequence[str], shown: bool = True, **others: Any) -> list[dict[str, Any]]:
        """Return what a chat template shows of the functions: their JSON schemas, as transformers makes them.

        Raises ValueError for a function without type hints, or whose docstring lacks an argument.
        """
        from transformers.utils import get_json_schema

        found = []
        for path in functions if shown else ():
            try:
                found.append(get_json_schema(get_method(path)))
            except Exception as error:  # a module may raise anything
                raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
        return found

    def reset(self, task: Task) -> None:
        self.calls = self.errors = 0

    async def step(self, completion: str) -> Reply | Done:
        """Return the results of the calls in a completion, in their order, or the end if there is none."""
        results = []
        for call in self.read(completion):
            self.calls += 1
            text, failed = await self._call(call)
            self.errors += failed
            results.append({"role": self.role, "content": text if len(text) <= MOST else f"{text[:MOST]}…"})
        return Reply(results) if results else Done(None, {"tool_calls": self.calls, "tool_errors": self.errors})

    async def _call(self, call: Call | str) -> tuple[str, bool]:
        """Return the result of a call as text, and whether it failed."""
        if isinstance(call, str):
            return f"Error: {call}", True
        name, arguments = call
        if name not in self.functions:
            return f"Error: there is no function {name}; there are: {', '.join(self.functions)}", True
        try:
            result = self.functions[name](**arguments)
            result = await result if inspect.isawaitable(result) else result
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str), False
        except Exception as error:
            return f"Error: {type(error).__name__}: {error}", True


# ---- how models write calls: each reader yields (name, arguments), or what is wrong with one ------------------------


def _parsed(text: str, key: str) -> Iterator[Call | str]:
    """Yield the call, or calls, that JSON describes."""
    try:
        found = json.loads(text)
    except ValueError as error:
        yield f"the call is not JSON: {error}"
        return
    for call in found if isinstance(found, list) else [found]:
        arguments = call.get(key, {}) if isinstance(call, Mapping) else None
        if not isinstance(arguments, Mapping) or not isinstance(call.get("name"), str):
            yield f'a call must be {{"name": "…", "{key}": {{…}}}}'
        else:
            yield call["name"], dict(arguments)


def _hermes(completion: str) -> Iterator[Call | str]:
    for match in re.finditer(r"<tool_call>(.*?)(?:</tool_call>|\Z)", completion, re.DOTALL):
        yield from _parsed(match[1].strip(), "arguments")


def _llama(completion: str) -> Iterator[Call | str]:
    _, tag, text = completion.rpartition("<|python_tag|>")
    text = text.removesuffix("<|eom_id|>").strip()
    if tag or re.match(r'\{\s*"name"', text):
        yield from _parsed(text, "parameters")


def _mistral(completion: str) -> Iterator[Call | str]:
    _, tag, text = completion.partition("[TOOL_CALLS]")
    if tag:
        yield from _parsed(text.strip(), "arguments")


READERS: dict[str, Callable[[str], Iterator[Call | str]]] = {"hermes": _hermes, "llama": _llama, "mistral": _mistral}
