"""What a chat template is rendered with: a run's arguments and a run's clock, so that a prompt is the same whenever it is rendered."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from types import SimpleNamespace
from typing import Any

from jinja2 import Environment, TemplateError, meta
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from hybrid_rl.data.tasks import DataError

SET_BY_THE_RUN = ("messages", "add_generation_prompt")
KEY = "data.template_arguments"


class Template:
    """A tokenizer's `apply_chat_template` in which `arguments` are the template's variables, and it is always `now`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], now: datetime):
        self.tokenizer, self.arguments, self.now = tokenizer, dict(arguments), now

    def __call__(self, conversation: Any, **options: Any) -> Any:
        with _clock(self.now):
            return type(self.tokenizer).apply_chat_template(
                self.tokenizer, conversation, **{**self.arguments, **options}
            )

    def without(self, argument: str) -> Template:
        return Template(
            self.tokenizer, {name: value for name, value in self.arguments.items() if name != argument}, self.now
        )

    def check(self) -> None:
        """Raise DataError for an argument that the template does not use."""
        if not self.arguments:
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
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], now: datetime
) -> PreTrainedTokenizerBase:
    """Make the tokenizer render every chat with these arguments of its template and at this time; return it."""
    tokenizer.apply_chat_template = Template(tokenizer, arguments, now)  # type: ignore[method-assign, assignment]
    return tokenizer


@contextmanager
def _clock(now: datetime) -> Iterator[None]:
    """The time that templates are told: transformers gives them `strftime_now`, and takes no other one from its callers."""
    theirs = chat_template_utils.datetime
    chat_template_utils.datetime = SimpleNamespace(now=lambda: now)  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        chat_template_utils.datetime = theirs  # type: ignore[misc]
