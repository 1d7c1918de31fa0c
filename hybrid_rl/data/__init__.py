"""Tasks: where they come from, how they become token ids, and in which order they are drawn."""

from hybrid_rl.data.tasks import DataError, TaskSets, load_task_sets

__all__ = ["DataError", "TaskSets", "load_task_sets"]
