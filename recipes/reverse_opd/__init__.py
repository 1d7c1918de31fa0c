"""The tasks of `reverse`, of which only the short sentences come with a demonstration; the rest is for a teacher to show."""

from __future__ import annotations

from dataclasses import replace

from hybrid_rl.recipes import reverse

from hybrid_rl.data import TaskSets


def load_tasks(
    system_prompt: str, min_length: int, max_length: int, eval_tasks: int, longest_demonstration: int
) -> TaskSets:
    """reverse's sets, the SFT set without sentences longer than longest_demonstration. RL and held-out tasks have every length."""
    sets = reverse.load_tasks(system_prompt, min_length, max_length, eval_tasks)
    return replace(
        sets, sft=[task for task in sets.sft if task.answer is not None and len(task.answer) <= longest_demonstration]
    )
