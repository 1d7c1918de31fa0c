"""Write a run's report: a self-contained HTML page, and readable samples, from the files of the run's folder alone."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hybrid_rl.report.charts import (
    EVALUATIONS,
    Record,
    health_charts,
    learning_charts,
    phase_colour,
    phase_seconds,
    speed_charts,
)
from hybrid_rl.report.comparison import compare
from hybrid_rl.report.console import NOTHING, visible
from hybrid_rl.report.numbers import number, shown
from hybrid_rl.report.read import Run, mapping, read_run, text
from hybrid_rl.report.samples import evaluation_cases, markdown, step_cases
from hybrid_rl.report.templates import templates

Row = tuple[str, ...]
COUNTERS = {
    "silent_groups": "groups without a signal (all rewards equal)",
    "replacement_rounds": "rounds of replacing groups without a signal",
    "reward_errors": "rewards that failed",
    "missing_groups": "groups missing after the last replacement",
    "skipped": "optimizer steps skipped (non-finite number)",
}
MAX_ALARMS = 40  # steps with an alarm that are listed


def write_report(run_dir: Path, summary: dict[str, Any] | None = None, other: Path | None = None) -> Path:
    """Write report.html and samples.md into the run's folder, atomically, and return the path of report.html.

    `other` is the folder of a run to compare with. `summary` takes the place of summary.json, which marks a finished run and is therefore written after the report.

    Works while a run is going on: what is missing or half written is left out. The same files give the same bytes.
    Raises NotADirectoryError if there is no such folder.
    """
    from hybrid_rl.run_folder.files import atomic_file

    run = read_run(Path(run_dir), summary)
    facts, alarms = _facts(run), _alarms(run)
    evaluations, steps = evaluation_cases(run.folder / "rollouts"), step_cases(run.folder / "rollouts")
    html = (
        templates()
        .get_template("template.html.jinja")
        .render(
            title=facts["name"],
            facts=[value for key, value in facts.items() if key != "name" and value],
            method=method(run.config),
            nothing=_nothing(run),
            state=_state(run),
            cards=[_evaluation_cards(run), _cards(run)],
            charts={
                "Learning": learning_charts(run.sft, run.evals, run.rl, passes(run)),
                "Health": health_charts(run.rl),
                "Speed and memory": speed_charts(run.rl),
            },
            phases=_phase_rows(run.rl),
            stages=[(name, _duration(seconds)) for name, seconds in mapping(run.summary, "seconds").items()],
            counters=_counters(run),
            alarms=alarms[:MAX_ALARMS],
            more_alarms=len(alarms[MAX_ALARMS:]),
            evaluations=evaluations,
            steps=steps,
            compared=compare([run, read_run(other)], apart=True).shown() if other else None,
            config=run.config_text,
            environment=_environment(run),
        )
    )
    report = run.folder / "report.html"
    samples = markdown(" ".join([facts["name"], facts["date"]]).strip(), evaluations, steps)
    for path, content in ((run.folder / "samples.md", samples), (report, html)):
        with atomic_file(path) as file:
            file.write(visible(content).encode())
    return report


def _facts(run: Run) -> dict[str, str]:
    """Return what identifies the run. The date is taken from the folder's name, since file times change with a copy."""
    folder = run.folder.resolve().name
    date = re.search(r"(\d{4}-\d\d-\d\d)[ _T-](\d\d)[-:.]?(\d\d)(?:[-:.]?(\d\d))?", folder)
    seed = run.summary.get("seed", run.config.get("seed"))
    model, parameters = mapping(run.summary, "model"), number(mapping(run.summary, "model").get("parameters"))
    embedded = "embedded tiny model" if run.config or model else ""
    path = text(model.get("path") or mapping(run.config, "model").get("path") or embedded)
    return {
        "name": text(run.summary.get("name") or run.config.get("name")) or folder,
        "date": f"{date[1]} {date[2]}:{date[3]}" if date else "",
        "seed": "" if seed is None else f"seed {text(seed)}",
        "model": path + ("" if math.isnan(parameters) else f" ({_parameters(parameters)} parameters)"),
    }


def method(config: dict[str, Any]) -> list[str]:
    """Return algorithm, learning rate and batch, as far as the configuration has them."""
    algo, rl, r = (mapping(config, key) for key in ("algo", "rl", "rollout"))
    optimizer = mapping(rl, "optimizer")
    parts = [_part(mapping(algo, name)) for name in ("advantage", "loss", "aggregation")]
    parts += [_part(part) for part in mapping(algo, "correction").values() if isinstance(part, dict)]
    if number(mapping(algo, "kl").get("coef")) > 0:
        parts.append(f"KL {shown(mapping(algo, 'kl')['coef'])}")
    rate, size, group = number(optimizer.get("lr")), number(r.get("batch_size")), number(r.get("group_size"))
    updates = number(algo.get("minibatches")) * number(algo.get("epochs"))
    lines = [
        " + ".join(part for part in parts if part),
        "" if math.isnan(rate) else f"learning rate {shown(rate)} {text(optimizer.get('schedule'))}".strip(),
        f"{shown(size / group)} tasks × {shown(group)} rollouts a step" if size and group > 0 else "",
        f"{shown(updates)} update{'s' * (updates != 1)} a step" if updates > 0 else "",
    ]
    return [line for line in lines if line] if rl.get("steps") else []


def _part(part: dict[str, Any]) -> str:
    """Return the name of an algorithm's part: the file name of a part of hybrid_rl, the whole path of another."""
    around = r"^hybrid_rl\.algo\.(aggregation\.)?|(?<=\w)\.(advantages|loss|correct)$"
    return re.sub(around, "", text(part.get("_target_")))


def passes(run: Run) -> str:
    """Return when a sample of an evaluation counts as correct."""
    least = number(mapping(run.config, "eval").get("pass_reward"))
    return "" if math.isnan(least) else f"reward ≥ {shown(least)}"


def _nothing(run: Run) -> str:
    """Return the warning that no RL step had an update, with the reasons; "" if one had."""
    reasons = [text(r.get("nothing_trained")) for r in run.rl]
    if not reasons or not all(reasons):
        return ""
    why = [f"in {reasons.count(name)} of them {NOTHING[name][0]}" for name in dict.fromkeys(reasons) if name in NOTHING]
    remedy = NOTHING[reasons[-1]][1] if reasons[-1] in NOTHING else ""
    return f"None of {len(reasons)} RL steps had an update: {'; '.join(why)}. What to do: {remedy}."


def _state(run: Run) -> str:
    """Return notes about an unfinished run, steps without an update, alarms and unreadable records."""
    planned = number(mapping(run.config, "rl").get("steps"))
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
    """Return a card for the reward of each evaluation, with its standard error and the change from the one before.

    A card without a value stands for an evaluation that is still to come.
    """
    cards: list[dict[str, str]] = []
    before, right = math.nan, passes(run)
    for name, (label, *_) in EVALUATIONS.items():
        record = run.evaluation(name)
        if not record and (run.summary or name == "model" or run.evaluation("model")):
            continue
        reward, tasks = number(record.get("reward")), number(record.get("tasks"))
        error = number(record.get("reward_std")) / math.sqrt(tasks) if tasks > 0 else math.nan
        note = "" if math.isnan(error) else f"± {error:.2g} standard error, {shown(tasks)} tasks"
        correct = number(record.get("correct"))
        if not math.isnan(correct):
            note += f"{', ' if note else ''}{shown(correct, percent=True)} correct" + (f" ({right})" if right else "")
        moved = reward - before
        change = f"{moved:+.3f}".replace("-", "\N{MINUS SIGN}") if abs(moved) < 1e6 else ""
        cards.append({"label": f"reward, {label}", "value": shown(reward), "change": change, "note": note})
        before = before if math.isnan(reward) else reward
    return cards


def _cards(run: Run) -> list[dict[str, str]]:
    """Return cards for steps, time, throughput and memory, those that have data."""
    total = number(mapping(run.summary, "seconds").get("total"))
    whole = not math.isnan(total)
    seconds = total if whole else sum(map(sum, phase_seconds(run.rl).values()))
    speed = [x for r in run.rl if not math.isnan(x := number(r.get("tokens_per_second")))]
    memory = [x for r in run.rl if not math.isnan(x := number(r.get("memory_gib")))]
    planned = number(mapping(run.config, "rl").get("steps"))
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
    """Return (phase, median seconds of a step, share of the total time, colour) of each phase."""
    phases = phase_seconds(rl)
    total = sum(map(sum, phases.values()))
    if not total:
        return []
    return [
        (name, shown(median(seconds)), shown(sum(seconds) / total, percent=True), phase_colour(name, position))
        for position, (name, seconds) in enumerate(phases.items())
    ]


def _counters(run: Run) -> list[Row]:
    """Return (what, total, number of steps with it, last of them) of each counter above zero."""
    rows: list[Row] = []
    for key, label in COUNTERS.items():
        hits = {r["step"]: number(r.get(key)) for r in run.rl if number(r.get(key)) > 0}
        if hits:
            rows.append((label, shown(sum(hits.values())), f"{len(hits)} of {len(run.rl)}", str(max(hits))))
    errors = [x for e in run.evals if (x := number(e.get("reward_errors"))) > 0]
    if errors:
        rows.append(("rewards that failed in evaluations", shown(sum(errors)), "–", "–"))
    holes = [
        r["step"] for r in run.rl if any(isinstance(value, float) and not math.isfinite(value) for value in r.values())
    ]
    if holes:
        found = f"{len(holes)} of {len(run.rl)}"
        rows.append(("steps with a non-finite metric", str(len(holes)), found, str(max(holes))))
    return rows


def _alarms(run: Run) -> list[Row]:
    """Return (step, names of the alarms that began in it) of the steps with alarms."""
    named = [(str(r["step"]), r.get("alarms")) for r in run.rl]
    return [(step, ", ".join(map(text, names))) for step, names in named if isinstance(names, list) and names]


def _environment(run: Run) -> list[Row]:
    return [
        (str(key), text(value))
        for group in ("versions", "machine")
        for key, value in mapping(run.summary, group).items()
    ]


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
