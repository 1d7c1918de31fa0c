"""Choose samples of what the model wrote, by rules that the report states, and write them as Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_rl.report.charts import EVALUATIONS
from hybrid_rl.report.console import visible
from hybrid_rl.report.numbers import number, shown

EVALUATED = 6  # tasks shown before and after
BROWSED = 9  # RL steps whose samples are shown
HEAD, TAIL = 3000, 1500  # characters kept of a long text; the end holds the answer
COLUMNS = (
    *("task_id", "source", "group_id", "index", "prompt", "completion", "answer", "finish_reason"),
    *("reward", "reward_parts", "measures", "advantage", "trained", "error"),
)


@dataclass(frozen=True)
class Sample:
    """One completion with its facts."""

    label: str
    completion: str
    facts: tuple[tuple[str, str], ...]  # (name, value): reward, finish reason, …


@dataclass(frozen=True)
class Case:
    """One task and one or more completions of it."""

    title: str
    prompt: str
    answer: str
    samples: tuple[Sample, ...]


def evaluation_cases(rollouts: Path) -> list[Case]:
    """Return the same tasks under each evaluation that exists, spread evenly over the set and not chosen by result.

    Each shows the first sample of the task.
    """
    columns: dict[str, dict[str, dict[str, Any]]] = {}
    for name, (label, *_) in EVALUATIONS.items():
        rows = _read(rollouts / f"eval_{name}.parquet")
        if rows:
            columns[label] = {row["task_id"]: row for row in reversed(rows)}
    if not columns:
        return []
    first = next(iter(columns.values()))
    common = [task for task in reversed(first) if all(task in rows for rows in columns.values())]
    count = min(EVALUATED, len(common))
    chosen = [common[i * len(common) // count] for i in range(count)]
    return [_case(_heading(first[task]), [(label, rows[task]) for label, rows in columns.items()]) for task in chosen]


def step_cases(rollouts: Path) -> list[tuple[int, list[Case]]]:
    """Return (step, cases) of at most BROWSED RL steps, the first and the newest among them, spread evenly.

    A step whose rollouts cannot be read gives way to a later one, or else to an earlier one.
    """
    paths = sorted(rollouts.glob("step_*.parquet"), key=_step)
    count = min(BROWSED, len(paths))
    found: dict[Path, list[Case]] = {}
    for place in (i * (len(paths) - 1) // max(1, count - 1) for i in range(count)):
        for path in (*paths[place:], *reversed(paths[:place])):
            if cases := found.get(path) or _cases_of_step(path):
                found[path] = cases
                break
    return [(_step(path), found[path]) for path in paths if path in found]


def _cases_of_step(path: Path) -> list[Case]:
    """Return a step's best, median and worst rollout, and the first that failed, if any."""
    rows = _read(path)
    scored = sorted(
        (row for row in rows if row["reward"] is not None),
        key=lambda row: (-row["reward"], row["group_id"], row["index"]),
    )
    places = {0: "best", len(scored) // 2: "median", len(scored) - 1: "worst"} if scored else {}
    if len(scored) == 2:
        places = {0: "best", 1: "worst"}
    picked = [(label, scored[place]) for place, label in sorted(places.items())]
    picked += [("failed", row) for row in rows if row["reward"] is None][:1]
    return [_case(f"{label.capitalize()}: {_heading(row)}", [(label, row)]) for label, row in picked]


def markdown(title: str, evaluations: Sequence[Case], steps: Sequence[tuple[int, list[Case]]]) -> str:
    """Return the cases as Markdown; texts of the run stay inside fences and code spans that they cannot close."""
    lines = [f"# Samples of {_span(title)}"]
    lines += [
        "## Evaluation",
        "The same tasks each time, taken evenly over the set and not by result." if evaluations else "None yet.",
    ]
    for case in evaluations:
        lines += _case_lines(case)
    for step, cases in steps:
        lines += [f"## RL step {step}", "By reward, over all rollouts of the step."]
        for case in cases:
            lines += _case_lines(case)
    if not steps:
        lines += ["## RL steps", "None yet."]
    return "\n\n".join(lines) + "\n"


def _case_lines(case: Case) -> list[str]:
    lines = [f"### {_span(case.title)}", "Prompt", _fence(case.prompt), "Truth", _fence(case.answer)]
    for sample in case.samples:
        facts = ", ".join(_span(f"{name} {value}") for name, value in sample.facts)
        lines += [f"**{sample.label}**: {facts}", _fence(sample.completion)]
    return lines


def _fence(text: str) -> str:
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{ticks}text\n{text}\n{ticks}"


def _span(text: str) -> str:
    text = " ".join(visible(text).split())
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{ticks} {text} {ticks}" if "`" in text else f"`{text}`" if text else "–"


def _read(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa

    from hybrid_rl.run_folder.rollouts import read_rollouts

    try:
        return read_rollouts(path, COLUMNS)
    except (OSError, pa.ArrowException):  # missing or incomplete
        return []


def _step(path: Path) -> int:
    digits = path.stem.removeprefix("step_")
    return int(digits) if digits.isdecimal() else 0


def _heading(row: dict[str, Any]) -> str:
    return f"{row['task_id']} ({row['source']})" if row["source"] else str(row["task_id"])


def _case(title: str, labelled: Sequence[tuple[str, dict[str, Any]]]) -> Case:
    row = labelled[0][1]
    return Case(
        title, _clip(row["prompt"]), _clip(row["answer"]), tuple(_sample(label, row) for label, row in labelled)
    )


def _sample(label: str, row: dict[str, Any]) -> Sample:
    facts = [("reward", shown(row["reward"]))]
    parts = {name: value for name, value in row["reward_parts"].items() if name != "reward"}
    facts += [(name, shown(value)) for name, value in [*sorted(parts.items()), *sorted(row["measures"].items())]]
    if not math.isnan(number(row["advantage"])):
        facts.append(("advantage", shown(row["advantage"])))
    facts.append(("finish", row["finish_reason"] or "unknown"))
    if row["error"]:
        facts.append(("error", _clip(row["error"])))
    return Sample(label, _clip(row["completion"]), tuple(facts))


def _clip(text: str) -> str:
    if len(text) <= HEAD + TAIL:
        return text
    return f"{text[:HEAD]}\n[… {len(text) - HEAD - TAIL:,} characters left out …]\n{text[-TAIL:]}"
