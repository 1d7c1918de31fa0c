"""What a chat template puts between two answers: an environment's messages as token ids, appended to those sampled.

Nothing is tokenized twice: earlier turns stay as they were sampled, also if the template would show them otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from hybrid_rl.data.tasks import DataError
from hybrid_rl.data.template import rendered
from hybrid_rl.model_folder.tokenizer import closing, first_mark
from hybrid_rl.types import Task

MARK = "(the policy's answer 7f3a)"  # stands for an answer; no other text holds it
Messages = Sequence[dict[str, str]]


def reply_ids(task: Task, replies: Messages, last: int, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids between an answer that ended with the token `last` and the policy's next one.

    These are the rest of the answer's turn, as far as it is not sampled, the messages, and the beginning of an answer.
    Raises DataError for messages that the chat template refuses.
    """
    after = _after_answer(task, MARK, replies, tokenizer)
    # some templates end an earlier turn with another mark than the last one
    if tokenizer.encode(closing(tokenizer), add_special_tokens=False)[-1:] == [last]:
        after = after.removeprefix(first_mark(after, tokenizer))
    return list(tokenizer(after, add_special_tokens=False)["input_ids"])


def _after_answer(task: Task, answer: str, replies: Messages, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the chat template puts after an answer in a conversation that goes on."""
    turns = [{"role": "assistant", "content": answer}, *replies]
    _, found, after = rendered(task, tokenizer.apply_chat_template, turns).rpartition(answer)
    if not found:
        raise DataError(f"task {task.id}: the chat template leaves out an earlier answer; use another one")
    return after


def history_notes(task: Task, role: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield a line for each way in which the chat template shows earlier answers otherwise than they were sampled.

    `role` is that of the environment's replies. Raises DataError if the template does not take or show it.
    """
    reply = [{"role": role, "content": "a reply"}]
    if "a reply" not in _after_answer(task, MARK, reply, tokenizer):
        raise DataError(
            f"task {task.id}: the chat template leaves out what the environment replies as {role}; use another role"
        )
    for answer, what in (
        (f"<think>\nan idea\n</think>\n\n{MARK}", "the thoughts of"),
        (f" {MARK}  ", "the blanks around"),
    ):
        turns = [{"role": "assistant", "content": answer}, *reply]
        if answer not in rendered(task, tokenizer.apply_chat_template, turns):
            yield f"the chat template drops {what} earlier answers; the conversation keeps what was sampled"
