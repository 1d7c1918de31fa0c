"""Chat messages to token ids, once: from here on a prompt is its ids and is never tokenized again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rl.data.tasks import DataError, TaskSets
from hybrid_rl.types import Rollout, Task

AT_ONCE = 1000  # prompts that are rendered together where all of them are checked


def prompt_ids(task: Task, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[int]:
    """The task rendered by the tokenizer's chat template, ready for the answer. The template alone adds special tokens.

    Raises DataError for a prompt longer than `max_tokens`, and for one that the template refuses or begins twice.
    """
    try:
        (ids,) = _rendered([task], tokenizer)
    except Exception as error:  # the template is a program that came with the model: it may raise anything
        reason = (str(error).strip().splitlines() or [""])[0]
        raise DataError(f"task {task.id}: the tokenizer's chat template does not take its messages: {reason}") from error
    if problem := _prompt_problem(ids, tokenizer, max_tokens):
        raise DataError(f"task {task.id}: {problem}")
    return ids


def check_prompts(
    sets: TaskSets, tokenizer: PreTrainedTokenizerBase, vocabulary: int, *, max_tokens: int, row_tokens: int, sft: bool
) -> int:  # fmt: skip
    """Render every prompt, and where `sft` every demonstration, before the model, which knows `vocabulary` tokens, loads.

    Returns the length of the longest demonstration with its prompt, 0 without `sft`. Raises DataError for the first that cannot be used.
    """
    if sft:
        _check_end(tokenizer)
    longest = 0
    for name, tasks in (("rl", sets.rl), ("eval", sets.eval), ("sft", sets.sft if sft else [])):
        for first in range(0, len(tasks), AT_ONCE):
            some = list(tasks[first : first + AT_ONCE])
            try:
                prompts = _rendered(some, tokenizer)
                good = not any(_prompt_problem(ids, tokenizer, max_tokens) for ids in prompts)
            except Exception:  # of one among them
                good = False
            if not good:
                for task in some:
                    prompt_ids(task, tokenizer, max_tokens)
            demonstrations = [str(task.demonstration) if name == "sft" else "" for task in some]
            answers = tokenizer(demonstrations, add_special_tokens=False)["input_ids"]
            for task, prompt, answer in zip(some, prompts, answers, strict=True):
                if (last := max(*prompt, *answer, 0)) >= vocabulary:
                    raise DataError(
                        f"task {task.id}: the tokenizer gives token {last}, the model knows {vocabulary}; they do not belong together"
                    )
                if name == "sft" and (length := len(prompt) + len(answer) + 1) > row_tokens:
                    raise DataError(
                        f"task {task.id}: prompt and demonstration have {length} tokens, policy.row_tokens={row_tokens}; raise it or drop the task"
                    )
                longest = max(longest, length if name == "sft" else 0)
    return longest


def marks_in(sets: TaskSets, tokenizer: PreTrainedTokenizerBase) -> str:
    """One line about tasks whose own text holds a mark of the tokenizer (as `<|im_end|>`), "" where none does.

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
    if tokenizer.eos_token_id is None:
        raise DataError("sft.steps: the tokenizer names no eos_token, which ends a demonstration; name it in tokenizer_config.json")


def _rendered(tasks: Sequence[Task], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    conversations = [list(task.messages) for task in tasks]
    rendered: Any = tokenizer.apply_chat_template(conversations, add_generation_prompt=True, tokenize=True, return_dict=False)
    return [list(ids) for ids in rendered]


def _prompt_problem(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> str:
    """What keeps a rendered prompt from being used; "" where nothing does."""
    if not ids:
        return "its prompt has no tokens; the tokenizer's chat template makes nothing of its messages"
    if len(ids) > max_tokens:
        return f"its prompt has {len(ids)} tokens, rollout.max_prompt_tokens={max_tokens}; raise it or drop the task"
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        return "its prompt begins with the start token (bos) twice; take one out of the tokenizer's chat template"
    return ""


def demonstration(task: Task, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Rollout:
    """The task answered by its demonstration and the end token, as a rollout whose answer is to be imitated.

    Raises DataError as `prompt_ids` does, and where the tokenizer names no end token.
    """
    _check_end(tokenizer)
    rollout = Rollout(task.id, group_id=0, index=0, seed=0, token_ids=prompt_ids(task, tokenizer, max_tokens))
    answer = [*tokenizer.encode(task.demonstration, add_special_tokens=False), tokenizer.eos_token_id]
    rollout.add_sampled(answer, [0.0] * len(answer), [(0, len(answer))])
    return rollout


def completion_text(token_ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """What a reward sees: the sampled tokens without special ones (end of turn, padding)."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))
