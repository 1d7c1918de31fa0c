"""Chat messages to token ids, once: from here on a prompt is its ids and is never tokenized again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from hybrid_rl.data.conversation import history_notes
from hybrid_rl.data.tasks import DataError, TaskSets
from hybrid_rl.data.template import KEY, Template, rendered
from hybrid_rl.model_folder.tokenizer import closing, exact_text
from hybrid_rl.processes.bounded import SECONDS, Begin, Overrun, bounded
from hybrid_rl.types import Rollout, Task

TEMPLATE = "the chat template"
AT_ONCE = 100  # prompts that are tokenized together when all of them are checked


def prompt_ids(task: Task, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[int]:
    """Return the task rendered by the tokenizer's chat template, ready for the answer. The template alone adds special tokens.

    Raises DataError for a prompt longer than `max_tokens`, and for one that the template refuses or begins twice.
    """
    (ids,) = _ids([rendered(task, tokenizer.apply_chat_template)], tokenizer)
    if problem := _prompt_problem(ids, tokenizer, max_tokens):
        raise DataError(f"task {task.id}: {problem}")
    return ids


@dataclass(frozen=True, slots=True)
class Checked:
    """What the check of all prompts found: their lengths in tokens, by set, and lines that a user should read."""

    lengths: dict[str, list[int]]
    longest: int  # the longest demonstration with its prompt, in tokens; 0 without SFT
    notes: list[str]
    dropped: dict[str, str]  # id of each task that is too long → why, if such tasks are dropped


@dataclass(frozen=True, slots=True)
class Limits:
    """How long tasks may be, in tokens: a prompt, and for SFT a prompt with its demonstration."""

    prompt: int
    row: int
    drop: bool = False  # tasks that are longer, instead of refusing them

    def problem(self, prompt: int, demonstration: int | None = None) -> str:
        """Return why a task of these lengths is dropped, "" if it is not."""
        if self.drop and prompt > self.prompt:
            return f"prompt over rollout.max_prompt_tokens={self.prompt} tokens"
        if self.drop and demonstration is not None and prompt + demonstration > self.row:
            return f"prompt and demonstration over policy.row_tokens={self.row} tokens"
        return ""


def check_prompts(
    sets: TaskSets,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int,
    limits: Limits,
    *,
    sft: bool,
    replies: str | None = None,
) -> Checked:
    """Render every prompt, and with `sft` every demonstration, before the model, which knows `vocabulary` tokens, loads.

    `replies` is the role in which an environment answers the policy, None without one.

    Template and tokenizer are programs that came with the model, so this happens in a process that can be killed; what is rendered
    later is the same again. Raises DataError for the first that cannot be used, and for a program that does not end.
    """
    try:
        return bounded(lambda begin: _check(sets, tokenizer, vocabulary, limits, sft, replies, begin), SECONDS)
    except Overrun as error:
        raise DataError(
            f"{error.doing} of {tokenizer.name_or_path or 'the model'} {error.text}; mend it in the model's folder, or use another model"
        ) from error


def _check(
    sets: TaskSets,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int,
    limits: Limits,
    sft: bool,
    replies: str | None,
    begin: Begin,
) -> Checked:
    template: Any = tokenizer.apply_chat_template
    lengths: dict[str, list[int]] = {}
    dropped: dict[str, str] = {}
    absent: dict[str, list[str]] = {}  # by role the tasks that have a message which the template leaves out
    idle = (
        set(template.arguments) if isinstance(template, Template) else set()
    )  # arguments that changed no prompt so far
    if sft:
        _check_end(tokenizer)
    if isinstance(template, Template):
        begin(f"variables: {TEMPLATE}")
        template.check()
    longest = 0
    for name, tasks in (("rl", sets.rl), ("eval", sets.eval), ("sft", sets.sft if sft else [])):
        lengths[name] = []
        for first in range(0, len(tasks), AT_ONCE):
            some, texts = tasks[first : first + AT_ONCE], []
            for task in some:
                begin(f"task {task.id}: {TEMPLATE}")
                texts.append(rendered(task, template))
                for role in set(_absent(task, texts[-1])):
                    absent.setdefault(role, []).append(task.id)
            if first == 0 and some:
                if rendered(some[0], template) != texts[0]:
                    raise DataError(
                        f"task {some[0].id}: {TEMPLATE} gives another prompt each time; take out what is random in it"
                    )
                idle -= {argument for argument in idle if _differs(some[0], template.without(argument), texts[0])}
            begin(f"tasks {some[0].id} to {some[-1].id}: the tokenizer")
            prompts = _each(texts, tokenizer, [f"task {task.id}: the tokenizer" for task in some], begin)
            answers: list[list[int]] = [[]] * len(some)
            if name == "sft":
                names = [f"task {task.id}, demonstration: the tokenizer" for task in some]
                answers = _each([f"{task.demonstration}{closing(tokenizer)}" for task in some], tokenizer, names, begin)
            for task, prompt, answer in zip(some, prompts, answers, strict=True):
                if why := limits.problem(len(prompt), len(answer) if name == "sft" else None):
                    dropped[task.id] = why
                    continue
                problem = _prompt_problem(prompt, tokenizer, limits.prompt)
                if not problem and (last := max(*prompt, *answer, 0)) >= vocabulary:
                    problem = (
                        f"the tokenizer gives token {last}, the model knows {vocabulary}; they do not belong together"
                    )
                if not problem and name == "sft" and (length := len(prompt) + len(answer)) > limits.row:
                    problem = (
                        f"prompt and demonstration have {length} tokens, policy.row_tokens={limits.row}; raise it or drop "
                        "the task (data.drop_long=true drops all that are too long)"
                    )
                if problem:
                    raise DataError(f"task {task.id}: {problem}")
                lengths[name].append(len(prompt))
                longest = max(longest, length if name == "sft" else 0)
    notes = [
        f"the chat template leaves out the {role} message of {len(ids)} task{'s' * (len(ids) > 1)} (first: task {ids[0]}); the model never "
        "sees its text. Put it into the user message, or use a template that shows it"
        for role, ids in sorted(absent.items())
    ]
    notes += [
        f"{KEY}.{argument}={json.dumps(template.arguments[argument])} changes no prompt" for argument in sorted(idle)
    ]
    for task in [*sets.rl, *sets.eval][:1] if replies else []:
        begin(f"task {task.id}, a reply of the environment: {TEMPLATE}")
        notes += history_notes(task, replies or "", tokenizer)
    return Checked(lengths, longest, [*notes, *filter(None, [marks_in(sets, tokenizer)])], dropped)


def _each(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, names: Sequence[str], begin: Begin
) -> list[list[int]]:
    """Return the token ids of each text: together, and one by one if that fails, so that the one at fault is known."""
    try:
        return _ids(texts, tokenizer)
    except BaseException:  # a panic is no Exception
        for name, text in zip(names, texts, strict=True):
            begin(name)
            try:
                _ids([text], tokenizer)
            except Exception as error:
                raise DataError(f"{name} does not take its text: {type(error).__name__}: {error}") from error
        raise


def _absent(task: Task, text: str) -> Iterator[str]:
    """Yield the role of each message whose text is not in the rendered one.

    Templates may trim a text, and drop an earlier thought.
    """
    for message in sorted(task.messages, key=lambda message: -len(message["content"])):
        shown = message["content"].rpartition("</think>")[2] if message["role"] == "assistant" else message["content"]
        for form in (shown.strip(), json.dumps(shown, ensure_ascii=False)[1:-1], json.dumps(shown)[1:-1]):
            if form in text:
                text = text.replace(form, "\0", 1)  # a shorter message must not be found inside this one
                break
        else:
            if " ".join(shown.split()) not in " ".join(text.split()):
                yield message["role"]


def marks_in(sets: TaskSets, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return one line about tasks whose own text holds a mark of the tokenizer (as `<|im_end|>`), "" if none does.

    A tokenizer reads it as the control token, wherever it stands: such a text can end its turn and begin another one.
    """
    marks = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    pattern = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"(?!)")
    found = []
    for task in (task for tasks in (sets.sft, sets.rl, sets.eval) for task in tasks):
        texts = [message["content"] for message in task.messages] + [task.demonstration or ""]
        if match := pattern.search("\n".join(texts)):
            found.append((task.id, match[0]))
    if not found:
        return ""
    task_id, mark = found[0]
    return (
        f"{len(found)} task{'s' * (len(found) > 1)} hold marks of the chat in their text (first: task {task_id}, {mark}); they become "
        "control tokens. Take them out where the text is not your own"
    )


def _check_end(tokenizer: PreTrainedTokenizerBase) -> None:
    if not closing(tokenizer):
        raise DataError(
            "sft.steps: neither the chat template nor the tokenizer names a token that ends a demonstration; name eos_token in "
            "tokenizer_config.json"
        )


def _differs(task: Task, template: Template, text: str) -> bool:
    try:
        return rendered(task, template) != text
    except DataError:  # it cannot do without the argument
        return True


def _ids(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return [list(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]


def _prompt_problem(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> str:
    """Return what keeps a rendered prompt from being used, or ""."""
    if not ids:
        return "its prompt has no tokens; the tokenizer's chat template makes nothing of its messages"
    if len(ids) > max_tokens:
        return (
            f"its prompt has {len(ids)} tokens, rollout.max_prompt_tokens={max_tokens}; raise it or drop the task "
            "(data.drop_long=true drops all that are too long)"
        )
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        return "its prompt begins with the start token (bos) twice; take one out of the tokenizer's chat template"
    return ""


def demonstration(task: Task, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Rollout:
    """Return the task answered by its demonstration, its turn ended as the chat template ends one, as a rollout whose answer is to be imitated.

    Raises DataError as `prompt_ids` does, and if there is no end token.
    """
    _check_end(tokenizer)
    rollout = Rollout(task.id, group_id=0, index=0, seed=0, token_ids=np.array(prompt_ids(task, tokenizer, max_tokens)))
    answer = tokenizer.encode(f"{task.demonstration}{closing(tokenizer)}", add_special_tokens=False)
    rollout.add_sampled(answer, [0.0] * len(answer), [(0, len(answer))])
    return rollout


def completion_text(token_ids: list[int], tokenizer: PreTrainedTokenizerBase, stopped: bool = False) -> str:
    """Return what a reward sees: every sampled token but padding and, where the completion `stopped` by itself, its
    last: the end token.
    """
    sampled = token_ids[:-1] if stopped else token_ids
    return exact_text([token for token in sampled if token != tokenizer.pad_token_id], tokenizer)
