"""The conversations of a rank's rollouts with their environment: what was said, and what the policy sees next."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from hybrid_rl.data.conversation import reply_ids
from hybrid_rl.model_folder.tokenizer import exact_text
from hybrid_rl.rollout.conversations import Said
from hybrid_rl.rollout.reward_call import Turn
from hybrid_rl.types import FinishReason, Rollout, Task


@dataclass(slots=True)
class Conversations:
    """What was said by rollout, with limits: `max_turns` answers, and `max_tokens` tokens after the prompt.

    Rollouts are told apart by their (group id, index).
    """

    tokenizer: PreTrainedTokenizerBase
    max_turns: int
    max_tokens: int
    _said: dict[tuple[int, int], Said] = field(default_factory=dict)

    def answered(self, rollout: Rollout, text: str, reason: FinishReason) -> Said:
        """Add the policy's answer, and return the conversation; `reason` is why the answer ended."""
        key = (rollout.group_id, rollout.index)
        before = self._said.get(key) or Said(rollout.seed, ())
        completions = (*before.completions, text)
        ended = reason != "stop" or len(completions) >= self.max_turns
        rollout.finish(reason, exact_text(rollout.token_ids[rollout.prompt_length :].tolist(), self.tokenizer))
        self._said[key] = Said(rollout.seed, completions, before.replies, ended)
        return self._said[key]

    def goes_on(self, rollout: Rollout, task: Task, turn: Turn) -> Said | None:
        """Append the environment's reply to the rollout; return None if the policy can answer it.

        Otherwise return the conversation as it ends, without the reply: no token would be left for an answer.
        """
        key = (rollout.group_id, rollout.index)
        said = self._said[key]
        ids = reply_ids(task, turn.messages, int(rollout.token_ids[-1]), self.tokenizer)
        if len(rollout.token_ids) - rollout.prompt_length + len(ids) >= self.max_tokens:
            rollout.finish("context", rollout.completion)
            return Said(said.key, said.completions, said.replies, ended=True)
        rollout.add_observed(ids)
        self._said[key] = Said(said.key, said.completions, (*said.replies, turn.messages))
        return None
