"""Tasks and scores of the package reasoning-gym, made on this machine: any of its data sets, by name."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from hybrid_rl.data.tasks import DataError
from hybrid_rl.rewards.text import find_answer
from hybrid_rl.types import Task


def rows(tasks: dict[str, dict[str, Any]], count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` tasks of each data set in `tasks`, a mapping of its name to its arguments.

    reasoning-gym draws the task at place i from `seed` + i: seeds less than `count` apart share tasks. Raises DataError for a name or argument that reasoning-gym does not know.
    """
    found = []
    for name, arguments in tasks.items():
        made = json.dumps({"name": name, "size": count, "seed": seed, **arguments}, sort_keys=True)
        for index, entry in enumerate(_dataset(made)):
            answer = entry["answer"] or ""
            found.append({"prompt": entry["question"], "answer": answer, "source": name, "made": made, "index": index})
    return found


@cache
def _dataset(made: str) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise DataError(
            "this recipe needs reasoning-gym, which is not installed; pip install -e '.[reasoning_gym]'"
        ) from error
    arguments = json.loads(made)
    try:
        return reasoning_gym.create_dataset(**arguments)
    except (ValueError, TypeError, AssertionError) as error:
        raise DataError(f"reasoning-gym cannot make {arguments.pop('name')} with {arguments}: {error}") from error


def score(completion: str, task: Task, within: str | None = "answer") -> tuple[float, dict[str, Any]]:
    """Pay what reasoning-gym gives for the answer, from 0 to 1, which for some data sets is partial credit.

    within: where the answer stands, as in hybrid_rl.rewards.text.find_answer. Measure: exact, whether that is 1.
    """
    found = find_answer(completion, within)
    dataset = _dataset(task.columns["made"])  # an entry is made again: its metadata need not be what JSON can hold
    paid = float(dataset.score_answer(found, dataset[task.columns["index"]]))
    return paid, {"exact": float(paid >= 1), "answer": found}
