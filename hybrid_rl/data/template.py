"""What a chat template is rendered with: a run's arguments and a run's clock, so that a prompt is the same whenever it
is rendered.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from types import SimpleNamespace
from typing import Any

from jinja2 import Environment, TemplateError, meta
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from hybrid_rl.config import DataConfig
from hybrid_rl.data.rows import short
from hybrid_rl.data.tasks import DataError
from hybrid_rl.model_folder.read import ModelError
from hybrid_rl.types import Task

SET_BY_THE_RUN = ("messages", "add_generation_prompt")
KEY = "data.template_arguments"
# of a base model: what its messages say
PLAIN = "{% for message in messages %}{{ '' if loop.first else '\\n\\n' }}{{ message.content }}{% endfor %}"


class Template:
    """A tokenizer's `apply_chat_template` in which `arguments` are the template's variables, and it is always `now`.

    `tools` names the column of a task that holds its own tools.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], now: datetime, tools: str | None = None
    ):
        self.tokenizer, self.arguments, self.now, self.tools = tokenizer, dict(arguments), now, tools

    def __call__(self, conversation: Any, **options: Any) -> Any:
        with _clock(self.now):
            return type(self.tokenizer).apply_chat_template(
                self.tokenizer, conversation, **{**self.arguments, **options}
            )

    def without(self, argument: str) -> Template:
        others = {name: value for name, value in self.arguments.items() if name != argument}
        return Template(self.tokenizer, others, self.now, self.tools)

    def own(self, task: Task) -> dict[str, Any]:
        """Return the variables of the task's own. Raises DataError for tools that are no list of objects."""
        found = task.columns.get(self.tools) if self.tools else None
        if isinstance(found, str):
            with suppress(ValueError):
                found = json.loads(found)
        if found is None:
            return {}
        if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
            raise DataError(
                f"task {task.id}: {self.tools}={short(found)}: must be a list of JSON descriptions of tools, or its text"
            )
        return {"tools": found}

    def check(self) -> None:
        """Raise DataError for an argument that the template does not use."""
        if not self.arguments and not self.tools:
            return
        try:
            source = self.tokenizer.get_chat_template(None, self.arguments.get("tools"))
            source = re.sub(
                r"\{%-?\s*(end)?generation\s*-?%\}", "", source
            )  # a tag of transformers, which jinja does not know
            used = meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source))
        except (ValueError, TemplateError, RecursionError) as error:
            raise DataError(f"the model's chat template cannot be read: {' '.join(str(error).split())}") from error
        known = sorted(used - {*SET_BY_THE_RUN, "strftime_now", "raise_exception"} - Environment().globals.keys())
        if self.tools and "tools" not in known:
            raise DataError(f"data.tools={self.tools}: the model's chat template shows no tools; leave it out")
        if self.arguments.get("tools") and "tools" not in known:
            raise DataError(
                "environment: the model's chat template describes no tools; set environment.shown=false, and describe them "
                "in the prompt"
            )
        for name, value in self.arguments.items():
            if name in SET_BY_THE_RUN:
                raise DataError(f"{KEY}.{name}={json.dumps(value)}: is set by the run; remove it")
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                there = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known) or 'none'}"
                raise DataError(
                    f"{KEY}.{name}={json.dumps(value)}: the model's chat template uses no such variable; {there}"
                )


def fix_template(
    tokenizer: PreTrainedTokenizerBase, data: DataConfig, now: datetime, tools: Sequence[dict[str, Any]] = ()
) -> PreTrainedTokenizerBase:
    """Make the tokenizer render every chat as `data` says, with an environment's tools, and at this time; return it.

    Raises ModelError if it has no chat template and needs one.
    """
    if not data.chat_template:
        begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        tokenizer.chat_template = ("{{ bos_token }}" if begins else "") + PLAIN
    elif tokenizer.chat_template is None:
        raise ModelError(
            f"model.path={tokenizer.name_or_path}: the tokenizer has no chat template; add chat_template.jinja to the "
            "folder, or set data.chat_template=false for a base model"
        )
    arguments = {**data.template_arguments, **({"tools": list(tools)} if tools else {})}
    template = Template(tokenizer, arguments, now, data.tools)
    tokenizer.apply_chat_template = template  # type: ignore[method-assign, assignment]
    return tokenizer


def rendered(task: Task, template: Callable[..., Any], more: Sequence[dict[str, str]] = ()) -> str:
    """Return the task's messages and `more` of a conversation as the template shows them, ready for an answer.

    Raises DataError if the template refuses them.
    """
    own = template.own(task) if isinstance(template, Template) else {}
    try:
        return str(template([*task.messages, *more], add_generation_prompt=True, tokenize=False, **own))
    except MemoryError:
        raise
    except Exception as error:  # the template is a program that came with the model: it may raise anything
        reason = (str(error).strip().splitlines() or [""])[0]
        what = "a reply of the environment" if more else "its messages"
        raise DataError(f"task {task.id}: the tokenizer's chat template does not take {what}: {reason}") from error


@contextmanager
def _clock(now: datetime) -> Iterator[None]:
    """Set the time that templates are told: transformers gives them `strftime_now`, and takes no other one from its
    callers.
    """
    theirs = chat_template_utils.datetime
    chat_template_utils.datetime = SimpleNamespace(now=lambda: now)  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        chat_template_utils.datetime = theirs  # type: ignore[misc]
