"""Two models on the same tasks: the difference of each score, task by task, with an interval, by source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_rl.report import intervals
from hybrid_rl.report.scores import task_values
from hybrid_rl.run_folder.rollouts import as_rollout, read_rollouts
from hybrid_rl.types import Group, Task

FILE = "versus.json"
EVALUATION = "eval_model.parquet"


def versus(folder: Path, other: Path, pass_reward: float) -> dict[str, Any]:
    """Return the differences of two evaluations, that of the run in `folder` minus that of the run in `other`.

    tasks: how many both have, and left_out: how many only one has. all: for each score (reward, correct, pass@k, maj@n)
    its difference, a paired Student's t interval of 95 % over tasks, and the p of a paired t test; by_source: the same
    of each source, if there are several. An interval or p that one task does not give is None.
    """
    ours, theirs = (_groups(run / "rollouts" / EVALUATION) for run in (folder, other))
    both = sorted(ours.keys() & theirs.keys())
    sources = sorted({ours[task].task.source or "unnamed" for task in both})

    def differences(tasks: Sequence[str]) -> dict[str, Any]:
        first, second = (task_values([groups[task] for task in tasks], pass_reward) for groups in (ours, theirs))
        pairs = {
            name: [a - b for a, b in zip(first[name], second[name], strict=True)] for name in first if name in second
        }
        return {"tasks": len(tasks), **{name: _paired(values) for name, values in pairs.items()}}

    by_source = {name: differences([t for t in both if (ours[t].task.source or "unnamed") == name]) for name in sources}
    return {
        "tasks": len(both),
        "left_out": len(ours.keys() ^ theirs.keys()),
        "all": differences(both) if both else {},
        "by_source": by_source if len(sources) > 1 else {},
    }


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line about all tasks, and one about each source."""
    for name, values in {"all tasks": found["all"], **found["by_source"]}.items():
        scores = [f"{score} {d['difference']:+.3f}{_interval(d)}" for score, d in values.items() if score != "tasks"]
        yield f"{name} ({values.get('tasks', 0)}): {', '.join(scores) or 'no task is in both'}"


def _interval(d: Mapping[str, Any]) -> str:
    return f" [{d['interval'][0]:+.3f}, {d['interval'][1]:+.3f}] p {d['p']:.2g}" if d["interval"] else ""


def _paired(values: Sequence[float]) -> dict[str, Any]:
    middle, half = intervals.interval(values)
    known = len(values) > 1
    return {
        "difference": middle,
        "interval": [middle - half, middle + half] if known else None,
        "p": intervals.paired(values) if known else None,
    }


def _groups(path: Path) -> dict[str, Group]:
    """Return the groups of a file of rollouts by task, with no more of the task than its id and source."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in read_rollouts(path):
        rows.setdefault(row["task_id"], []).append(row)
    return {
        id: Group(own[0]["group_id"], Task(id, ({"role": "user", "content": ""},), "", source=own[0]["source"]), made)
        for id, own in rows.items()
        if (made := [as_rollout(row) for row in sorted(own, key=lambda row: row["index"])])
    }
