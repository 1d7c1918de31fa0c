"""Chat messages to token ids, once: from here on a prompt is its ids and is never tokenized again."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from hybrid_rl.data.tasks import DataError
from hybrid_rl.types import Rollout, Task


def prompt_ids(task: Task, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[int]:
    """The task rendered by the tokenizer's chat template, ready for the answer. The template alone adds special tokens.

    Raises DataError for a prompt longer than `max_tokens`.
    """
    ids = tokenizer.apply_chat_template(list(task.messages), add_generation_prompt=True, tokenize=True, return_dict=False)
    if len(ids) > max_tokens:
        raise DataError(
            f"task {task.id}: its prompt has {len(ids)} tokens, rollout.max_prompt_tokens={max_tokens}; raise it or drop the task"
        )
    return list(ids)


def demonstration(task: Task, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Rollout:
    """The task answered by its demonstration and the end token, as a rollout whose answer is to be imitated."""
    rollout = Rollout(task.id, group_id=0, index=0, seed=0, token_ids=prompt_ids(task, tokenizer, max_tokens))
    answer = [*tokenizer.encode(task.demonstration, add_special_tokens=False), tokenizer.eos_token_id]
    rollout.add_sampled(answer, [0.0] * len(answer), [(0, len(answer))])
    return rollout


def completion_text(token_ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """What a reward sees: the sampled tokens without special ones (end of turn, padding)."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))
