"""Read the small files of a run's folder for its report, as far as they exist and are intact."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_rl.report.charts import Record
from hybrid_rl.report.numbers import number

MAX_STEP = 2**53  # the largest integer that a chart can tell from its neighbours


@dataclass(frozen=True)
class Run:
    """What the files of a run's folder say. Every record has a stage and an int step; steps ascend."""

    folder: Path
    config_text: str
    config: dict[str, Any]
    summary: dict[str, Any]
    sft: list[Record]
    evals: list[Record]
    rl: list[Record]
    broken_lines: int  # unreadable lines of metrics.jsonl, without the last one, which may be half written

    def evaluation(self, name: str) -> Record:
        """Return the newest evaluation of that name; only its reward if only the summary has it, {} if nothing has."""
        found = [e for e in self.evals if e["name"] == name]
        record = found[-1] if found else {}
        reward = number(self.summary.get(f"eval/{name}"))
        return record if math.isnan(reward) else {**record, "reward": reward}


def read_run(folder: Path, summary: dict[str, Any] | None = None) -> Run:
    """Return what the files of a run's folder say.

    A step recorded twice, before and after a resume, counts as last recorded.
    `summary` takes the place of summary.json. Raises NotADirectoryError if there is no such folder.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not the folder of a run")
    config_text = _read(folder / "config.yaml")
    lines = _read(folder / "metrics.jsonl").split("\n")
    records: dict[tuple[str, str, int], Record] = {}
    broken = 0
    for position, line in enumerate(lines):
        record = _json(line)
        stage, step = record.get("stage"), record.get("step")
        if (
            isinstance(stage, str)
            and type(step) is int
            and 0 <= step <= MAX_STEP
            and isinstance(record.setdefault("name", ""), str)
        ):
            records[stage, record["name"], step] = record
        elif line.strip() and position < len(lines) - 1:
            broken += 1
    ordered = sorted(records.values(), key=lambda record: record["step"])
    stages = {stage: [record for record in ordered if record["stage"] == stage] for stage in ("sft", "eval", "rl")}
    if summary is None:
        summary = _json(_read(folder / "summary.json"))
    return Run(folder, config_text, _yaml(config_text), summary, stages["sft"], stages["eval"], stages["rl"], broken)


def text(value: object) -> str:
    """Return a text or a number as a text, "" for anything else."""
    return str(value) if isinstance(value, str | int | float) else ""


def mapping(record: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the mapping under a key, {} if there is none."""
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except FileNotFoundError:
        return ""


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _yaml(text: str) -> dict[str, Any]:
    import yaml

    try:
        value = yaml.safe_load(text)
    except Exception:  # PyYAML raises whatever a damaged file provokes in it
        return {}
    return value if isinstance(value, dict) else {}
