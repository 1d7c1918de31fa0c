"""The three sets of tasks of a run, and the checks they must pass before anything is trained on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.utils import instantiate

from hybrid_rl.types import Task


class DataError(ValueError):
    """Tasks that cannot be used, with what to change."""


@dataclass(frozen=True, slots=True)
class TaskSets:
    """sft: demonstrations to imitate; rl: tasks to practise; eval: held out from both."""

    sft: Sequence[Task]
    rl: Sequence[Task]
    eval: Sequence[Task]

    def __post_init__(self) -> None:
        owner: dict[str, str] = {}
        for name, tasks in (("sft", self.sft), ("rl", self.rl), ("eval", self.eval)):
            for task in tasks:
                if task.id in owner:
                    where = f"twice in {name}" if owner[task.id] == name else f"in both {owner[task.id]} and {name}"
                    raise DataError(f"data: task {task.id!r} is {where}; ids must be unique and the sets disjoint")
                owner[task.id] = name


def load_task_sets(config: dict[str, Any], *, rl_tasks: int, sft_tasks: int) -> TaskSets:
    """Call the recipe's loader. Raises DataError for a set smaller than what one step draws from it (0: set unused)."""
    sets = instantiate(config)
    if not isinstance(sets, TaskSets):
        raise DataError(f"data._target_={config['_target_']} returned {type(sets).__name__}, not hybrid_rl.data.TaskSets")
    for name, tasks, needed, key in (
        ("rl", sets.rl, rl_tasks, "rollout.batch_size / rollout.group_size"),
        ("sft", sets.sft, sft_tasks, "sft.batch_size"),
        ("eval", sets.eval, 1, "1"),
    ):
        if len(tasks) < needed:
            raise DataError(f"data: the {name} set has {len(tasks)} tasks, fewer than the {needed} that a step needs ({key})")
    if sft_tasks and (bare := next((t for t in sets.sft if t.demonstration is None), None)):
        raise DataError(f"data: task {bare.id!r} of the sft set has no demonstration; give it one or set sft.steps=0")
    return sets
