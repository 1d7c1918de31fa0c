"""A run's report: one HTML page that needs nothing else, and readable samples, from the files of the run's folder alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hybrid_rl.report.charts import (
    EVALUATIONS,
    Record,
    health_charts,
    learning_charts,
    number,
    phase_colour,
    phase_seconds,
    shown,
    speed_charts,
)
from hybrid_rl.report.console import NOTHING, visible
from hybrid_rl.report.samples import evaluation_cases, markdown, step_cases

Row = tuple[str, ...]
COUNTERS = {
    "silent_groups": "groups without a signal (all rewards equal)",
    "replacement_rounds": "rounds of replacing groups without a signal",
    "reward_errors": "rewards that failed",
    "missing_groups": "groups missing after the last replacement",
    "skipped": "optimizer steps skipped (non-finite number)",
}
MAX_STEP = 2**53  # the largest whole number that a chart can tell from its neighbours
MAX_ALARMS = 40  # steps with an alarm that are listed


@dataclass(frozen=True)
class Run:
    """What a run's folder says, as far as it is there; every record has a stage and an int step, steps ascend."""

    folder: Path
    config_text: str
    config: dict[str, Any]
    summary: dict[str, Any]
    sft: list[Record]
    evals: list[Record]
    rl: list[Record]
    broken_lines: int  # of metrics.jsonl, the last one aside, which may be in the middle of being written

    def evaluation(self, name: str) -> Record:
        """The newest evaluation of that name; the reward alone where only the summary has it, {} where nothing has."""
        found = [e for e in self.evals if e["name"] == name]
        record = found[-1] if found else {}
        reward = number(self.summary.get(f"eval/{name}"))
        return record if math.isnan(reward) else {**record, "reward": reward}


def write_report(run_dir: Path, summary: dict[str, Any] | None = None) -> Path:
    """Write report.html and samples.md into the run's folder, atomically, and return the path of the former.

    `summary` is what summary.json is about to hold; it is written after the report, since it marks a finished run.

    Works in the middle of a run: what is missing or only half written is left out. The same files give the same bytes.
    Raises NotADirectoryError where there is no such folder.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from hybrid_rl.run_folder.files import atomic_file

    run = read_run(Path(run_dir), summary)
    facts, alarms = _facts(run), _alarms(run)
    evaluations, steps = evaluation_cases(run.folder / "rollouts"), step_cases(run.folder / "rollouts")
    # Completions, and all else that a run wrote, are untrusted: autoescape for every value, and nothing is marked safe.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    html = environment.get_template("template.html.jinja").render(
        title=facts["name"],
        facts=[value for key, value in facts.items() if key != "name" and value],
        method=_method(run.config),
        nothing=_nothing(run),
        state=_state(run),
        cards=[_evaluation_cards(run), _cards(run)],
        charts={
            "Learning": learning_charts(run.sft, run.evals, run.rl, _right(run)),
            "Health": health_charts(run.rl),
            "Speed and memory": speed_charts(run.rl),
        },
        phases=_phase_rows(run.rl),
        stages=[(name, _duration(seconds)) for name, seconds in _mapping(run.summary, "seconds").items()],
        counters=_counters(run),
        alarms=alarms[:MAX_ALARMS],
        more_alarms=len(alarms[MAX_ALARMS:]),
        evaluations=evaluations,
        steps=steps,
        config=run.config_text,
        environment=_environment(run),
    )
    report = run.folder / "report.html"
    samples = markdown(" ".join([facts["name"], facts["date"]]).strip(), evaluations, steps)
    for path, text in ((run.folder / "samples.md", samples), (report, html)):
        with atomic_file(path) as file:
            file.write(visible(text).encode())
    return report


def read_run(folder: Path, summary: dict[str, Any] | None = None) -> Run:
    """Read the small files of a run's folder. A step recorded twice, before and after a resume, counts as last recorded."""
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a run's folder")
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


def _facts(run: Run) -> dict[str, str]:
    """What identifies the run. The date is in the folder's name: a file's own time would not survive a copy."""
    folder = run.folder.resolve().name
    date = re.search(r"(\d{4}-\d\d-\d\d)[ _T-](\d\d)[-:.]?(\d\d)(?:[-:.]?(\d\d))?", folder)
    seed = run.summary.get("seed", run.config.get("seed"))
    model, parameters = _mapping(run.summary, "model"), number(_mapping(run.summary, "model").get("parameters"))
    path = _text(
        model.get("path")
        or _mapping(run.config, "model").get("path")
        or ("embedded tiny model" if run.config or model else "")
    )
    return {
        "name": _text(run.summary.get("name") or run.config.get("name")) or folder,
        "date": f"{date[1]} {date[2]}:{date[3]}" if date else "",
        "seed": "" if seed is None else f"seed {_text(seed)}",
        "model": path + ("" if math.isnan(parameters) else f" ({_parameters(parameters)} parameters)"),
    }


def _method(config: dict[str, Any]) -> list[str]:
    """Algorithm, learning rate and batch, as far as the configuration says."""
    algo, rl, r = (_mapping(config, key) for key in ("algo", "rl", "rollout"))
    optimizer = _mapping(rl, "optimizer")
    parts = [_part(_mapping(algo, name)) for name in ("advantage", "loss", "aggregation")]
    parts += [_part(part) for part in _mapping(algo, "correction").values() if isinstance(part, dict)]
    if number(_mapping(algo, "kl").get("coef")) > 0:
        parts.append(f"KL {shown(_mapping(algo, 'kl')['coef'])}")
    rate, size, group = number(optimizer.get("lr")), number(r.get("batch_size")), number(r.get("group_size"))
    updates = number(algo.get("minibatches")) * number(algo.get("epochs"))
    said = [
        " + ".join(part for part in parts if part),
        "" if math.isnan(rate) else f"learning rate {shown(rate)} {_text(optimizer.get('schedule'))}".strip(),
        f"{shown(size / group)} tasks × {shown(group)} rollouts a step" if size and group > 0 else "",
        f"{shown(updates)} update{'s' * (updates != 1)} a step" if updates > 0 else "",
    ]
    return [text for text in said if text] if rl.get("steps") else []


def _part(part: dict[str, Any]) -> str:
    """The name of an algorithm's part: the file's name of those that come along, the whole path of others."""
    return re.sub(
        r"^hybrid_rl\.algo\.(aggregation\.)?|(?<=\w)\.(advantages|loss|correct)$", "", _text(part.get("_target_"))
    )


def _right(run: Run) -> str:
    """When an evaluation's sample counts as correct."""
    least = number(_mapping(run.config, "eval").get("pass_reward"))
    return "" if math.isnan(least) else f"reward ≥ {shown(least)}"


def _nothing(run: Run) -> str:
    """Said in large letters if no RL step trained anything: how many there were, and why."""
    reasons = [_text(r.get("nothing_trained")) for r in run.rl]
    if not reasons or not all(reasons):
        return ""
    why = [f"in {reasons.count(name)} of them {NOTHING[name][0]}" for name in dict.fromkeys(reasons) if name in NOTHING]
    remedy = NOTHING[reasons[-1]][1] if reasons[-1] in NOTHING else ""
    return f"None of {len(reasons)} RL steps had an update: {'; '.join(why)}. What to do: {remedy}."


def _state(run: Run) -> str:
    """Said on top where the run has not ended, or its record has holes."""
    planned = number(_mapping(run.config, "rl").get("steps"))
    notes = []
    empty = [r["step"] for r in run.rl if r.get("nothing_trained")]
    if empty and not _nothing(run):
        notes.append(f"Nothing was trained in {len(empty)} of {len(run.rl)} RL steps, first in step {empty[0]}.")
    if not run.summary:
        done = f"{run.rl[-1]['step']} of {shown(planned)} RL steps" if run.rl else "no RL step yet"
        notes.append(f"Not finished: {done}.")
    if alarms := _alarms(run):
        notes.append(
            f"Alarms began in {len(alarms)} of {len(run.rl)} RL steps, first in step {alarms[0][0]}: see Worth a look."
        )
    if run.broken_lines:
        notes.append(f"{run.broken_lines} unreadable lines of metrics.jsonl are left out.")
    return " ".join(notes)


def _evaluation_cards(run: Run) -> list[dict[str, str]]:
    """Reward before, after SFT, after RL: each with its standard error and the change from the one before."""
    cards: list[dict[str, str]] = []
    before, right = math.nan, _right(run)
    for name, (label, *_) in EVALUATIONS.items():
        record = run.evaluation(name)
        reward, tasks = number(record.get("reward")), number(record.get("tasks"))
        error = number(record.get("reward_std")) / math.sqrt(tasks) if tasks > 0 else math.nan
        note = "" if math.isnan(error) else f"± {error:.2g} standard error, {shown(tasks)} tasks"
        correct = number(record.get("correct"))
        note += (
            ""
            if math.isnan(correct)
            else f"{', ' if note else ''}{shown(correct, percent=True)} correct" + (f" ({right})" if right else "")
        )
        moved = reward - before
        change = f"{moved:+.3f}".replace("-", "\N{MINUS SIGN}") if abs(moved) < 1e6 else ""
        cards.append({"label": f"reward, {label}", "value": shown(reward), "change": change, "note": note})
        before = before if math.isnan(reward) else reward
    return cards


def _cards(run: Run) -> list[dict[str, str]]:
    total = number(_mapping(run.summary, "seconds").get("total"))
    whole = not math.isnan(total)
    seconds = total if whole else sum(map(sum, phase_seconds(run.rl).values()))
    speed = [x for r in run.rl if not math.isnan(x := number(r.get("tokens_per_second")))]
    memory = [x for r in run.rl if not math.isnan(x := number(r.get("memory_gib")))]
    planned = number(_mapping(run.config, "rl").get("steps"))
    cards = [
        (
            "RL steps",
            shown(run.rl[-1]["step"]) if run.rl else "",
            "" if math.isnan(planned) else f"of {shown(planned)}",
        ),
        ("time", _duration(seconds) if seconds else "", "the whole run" if whole else "RL so far"),
        ("tokens a second", shown(median(speed)) if speed else "", "median of RL steps"),
        ("peak memory", f"{shown(max(memory))} GiB" if memory else "", "largest of RL steps"),
    ]
    return [{"label": label, "value": value, "change": "", "note": note} for label, value, note in cards if value]


def _phase_rows(rl: Sequence[Record]) -> list[tuple[str, str, str, int]]:
    """(phase, median seconds of a step, share of all the time, colour)."""
    phases = phase_seconds(rl)
    total = sum(map(sum, phases.values()))
    if not total:
        return []
    return [
        (name, shown(median(seconds)), shown(sum(seconds) / total, percent=True), phase_colour(name, position))
        for position, (name, seconds) in enumerate(phases.items())
    ]


def _counters(run: Run) -> list[Row]:
    """(what, total, steps concerned, last of them), only what happened."""
    rows: list[Row] = []
    for key, text in COUNTERS.items():
        hits = {r["step"]: number(r.get(key)) for r in run.rl if number(r.get(key)) > 0}
        if hits:
            rows.append((text, shown(sum(hits.values())), f"{len(hits)} of {len(run.rl)}", str(max(hits))))
    errors = [x for e in run.evals if (x := number(e.get("reward_errors"))) > 0]
    if errors:
        rows.append(("rewards that failed in evaluations", shown(sum(errors)), "–", "–"))
    holes = [
        r["step"] for r in run.rl if any(isinstance(value, float) and not math.isfinite(value) for value in r.values())
    ]
    if holes:
        rows.append(
            (
                "steps with a metric that is not finite",
                str(len(holes)),
                f"{len(holes)} of {len(run.rl)}",
                str(max(holes)),
            )
        )
    return rows


def _alarms(run: Run) -> list[Row]:
    """(step, names of the alarms that began with it) of the steps that had any."""
    named = [(str(r["step"]), r.get("alarms")) for r in run.rl]
    return [(step, ", ".join(map(_text, names))) for step, names in named if isinstance(names, list) and names]


def _environment(run: Run) -> list[Row]:
    return [
        (str(key), _text(value))
        for group in ("versions", "machine")
        for key, value in _mapping(run.summary, group).items()
    ]


def _text(value: object) -> str:
    """A text or a number as a text; "" for what is neither, which may be nested to any depth."""
    return str(value) if isinstance(value, str | int | float) else ""


def _mapping(record: dict[str, Any], key: str) -> dict[str, Any]:
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def _duration(seconds: object) -> str:
    x = number(seconds)
    if math.isnan(x) or x < 60:
        return f"{shown(x)} s"
    minutes, rest = divmod(round(x), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def _parameters(count: float) -> str:
    for limit, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if count >= limit:
            return f"{count / limit:.3g}{unit}"
    return shown(count)


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
