"""The charts of a report, from the records of metrics.jsonl.

Texts are plain: the template escapes them like everything else that a run wrote.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid_rl.report.drawing import (
    COLOURS,
    FROM_ZERO,
    HUGE,
    LEFT,
    PERCENT,
    PLAIN,
    RIGHT,
    Chart,
    Curves,
    Legend,
    Point,
    Scale,
    Shape,
    chart,
    curve,
    dots,
    filled,
    finite,
    horizontal,
    vertical,
)
from hybrid_rl.report.numbers import number, shown

Record = dict[str, Any]

# these come first, so that each keeps its colour in every report
PHASES = ("rollout", "sleep", "update", "handover", "evaluate", "checkpoint")
# name → label, line, colour
EVALUATIONS = {
    "model": ("the model", "dotted", 6),
    "base": ("base", "dotted", 6),
    "sft": ("after SFT", "dashed", 2),
    "rl": ("after RL", "solid", 3),
}
CLIPPED = {"clip_fraction": "low and high", "clip_low": "low side", "clip_high": "high side", "clip_dual": "dual clip"}
GROUPS = {"silent_groups": "silent, replaced", "missing_groups": "missing from the batch"}
QUANTILES = {"p50": "median", "p01": "1st percentile", "p99": "99th percentile", "max": "largest"}
MAX_BARS = 60  # of a stacked chart; more steps are averaged
LOG = Scale(log=True)


def learning_charts(sft: Sequence[Record], evals: Sequence[Record], rl: Sequence[Record], right: str) -> list[Chart]:
    """Return the charts of learning: rewards, evaluations, learning rate and SFT loss, those that have data.

    `right` says when an evaluation's sample counts as correct.
    """
    at_steps = _one_a_step(evals)
    charts = (
        _reward(evals, rl),
        _named("Parts of the reward", "mean", rl, "parts", least=2),
        _named("Measures", "mean, not paid", rl, "measures"),
        _named("Reward by source", "mean", rl, "sources"),
        _named("Groups by source", "drawn, silent ones included", rl, "groups_drawn"),
        _named("Tasks by pass rate", "tasks, data.curriculum", rl, "curriculum"),
        _correct(at_steps, right),
        _named("Evaluation: measures", "mean, not paid", at_steps, "measures"),
        _named("Evaluation by source", "mean reward", at_steps, "sources"),
        _line("Learning rate", "of the policy", rl, "lr", FROM_ZERO),
        _line("SFT loss", "nats a token", sft, "loss", Scale("SFT step")),
    )
    return [chart for chart in charts if chart]


def health_charts(rl: Sequence[Record]) -> list[Chart]:
    """Return the charts that show whether an RL stage is healthy, those that have data."""
    kl = [number(r.get("mismatch_kl")) for r in rl]
    positive = any(x > 0 for x in kl) and not any(x <= 0 for x in kl)
    charts = (
        _line("Completion length", "tokens, mean", rl, "length", FROM_ZERO),
        _line("Truncated", "share of completions", rl, "truncated", PERCENT),
        _line("Repetition", "share of 4-grams", rl, "repetition", PERCENT),
        _lines("Groups without a signal", "number", _steps(rl), _fixed(rl, GROUPS), FROM_ZERO),
        _line("Entropy", "nats a token", rl, "entropy", FROM_ZERO),
        _line(
            "Mismatch KL",
            "nats, log scale" if positive else "nats a token",
            rl,
            "mismatch_kl",
            LOG if positive else PLAIN,
        ),
        _line("Reference KL", "nats a token", rl, "reference_kl", FROM_ZERO),
        _line("KL coefficient", "weight of the reference KL", rl, "kl_coef", FROM_ZERO),
        _lines("Clip fraction", "share of tokens", _steps(rl), _fixed(rl, CLIPPED), PERCENT),
        _ratios("Probability ratio", "new to old", rl, "ratio"),
        _named("Age of tokens", "share, by versions behind", rl, "lag"),
        _ratios("Mismatch ratio", "trainer to engine, before correction", rl, "correction"),
        _line("Dropped", "share of tokens, by a correction", rl, "dropped", PERCENT),
        _line("Advantage", "standard deviation", rl, "advantage_std", FROM_ZERO),
        _line("Critic loss", "mean", rl, "value_loss", FROM_ZERO),
        _line("Explained variance", "of returns, by the critic", rl, "explained_variance"),
        _line("Gradient norm", "before clipping", rl, "grad_norm", FROM_ZERO),
    )
    return [chart for chart in charts if chart]


def speed_charts(rl: Sequence[Record]) -> list[Chart]:
    """Return the charts of time, throughput and memory, those that have data."""
    charts = (
        _phases(rl),
        _line("Throughput", "tokens a second", rl, "tokens_per_second", FROM_ZERO),
        _line("Peak memory", "GiB", rl, "memory_gib", FROM_ZERO),
    )
    return [chart for chart in charts if chart]


def phase_seconds(rl: Sequence[Record]) -> dict[str, list[float]]:
    """Return seconds by phase, one entry a step, 0 if a step does not name the phase; known phases come first."""
    steps = [r["seconds"] if isinstance(r.get("seconds"), dict) else {} for r in rl]
    names = {str(name) for step in steps for name in step}
    ordered = [name for name in PHASES if name in names] + sorted(names.difference(PHASES))
    return {
        name: [0.0 if math.isnan(x := number(step.get(name))) else max(x, 0.0) for step in steps] for name in ordered
    }


def phase_colour(name: str, position: int) -> int:
    """Return the colour of the phase at `position`; a known phase has the same colour in every report."""
    return 1 + (PHASES.index(name) if name in PHASES else position) % COLOURS


def _steps(records: Sequence[Record]) -> list[int]:
    return [r["step"] for r in records]


def _values(records: Sequence[Record], key: str) -> list[float]:
    return [number(r.get(key)) for r in records]


def _fixed(records: Sequence[Record], labels: Mapping[str, str]) -> Curves:
    """Return label → values of the keys with data; the first key alone has no label."""
    found = {key: values for key in labels if finite({"": (values := _values(records, key))})}
    return {"" if list(found) == list(labels)[:1] else labels[key]: values for key, values in found.items()}


def _inner(records: Sequence[Record], key: str) -> list[Record]:
    """Return the mapping that each record has under a key, {} if it has none."""
    return [inner if isinstance(inner := r.get(key), dict) else {} for r in records]


def _one_a_step(evals: Sequence[Record]) -> list[Record]:
    """Return the evaluations in order of steps; of several at one step, the last in the order of the run."""
    known = ("model", "base", "sft", "step", "rl")
    ordered = sorted((e for e in evals if e["name"] in known), key=lambda e: known.index(e["name"]))
    newest = {e["step"]: e for e in ordered}
    return [newest[step] for step in sorted(newest)]


def _line(title: str, unit: str, records: Sequence[Record], key: str, scale: Scale = PLAIN) -> Chart | None:
    return _lines(title, unit, _steps(records), {"": _values(records, key)}, scale)


def _lines(title: str, unit: str, x: Sequence[int], curves: Curves, scale: Scale = PLAIN) -> Chart | None:
    """Return a chart with one curve a label, or None without a finite value.

    The newest value stands in the legend, or beside the title for a curve without a label.
    """
    values, percent = finite(curves), scale.percent
    if not values:
        return None
    down, across = vertical(values, scale.from_zero or percent, scale.log, 0.1 if percent else 1.0), horizontal(x)
    shapes = [shape for position, y in enumerate(curves.values()) for shape in curve(across, down, x, y, 1 + position)]
    newest = {
        label: shown(found[-1] if (found := finite({"": y})) else math.nan, percent) for label, y in curves.items()
    }
    legend = tuple(Legend(f"{label} {newest[label]}", 1 + position) for position, label in enumerate(curves) if label)
    return chart((title, unit), (across, down), shapes, legend, newest.get("", ""), scale)


def _ratios(title: str, unit: str, rl: Sequence[Record], prefix: str) -> Chart | None:
    """Return a chart with the quantiles of a probability ratio, on a log scale if the largest is above 10."""
    curves = _fixed(rl, {f"{prefix}_{name}": label for name, label in QUANTILES.items()})
    values = finite(curves)
    wide = bool(values) and min(values) > 0 and max(values) > 10
    return _lines(title, unit + (", log scale" if wide else ""), _steps(rl), curves, LOG if wide else PLAIN)


def _named(title: str, unit: str, records: Sequence[Record], key: str, least: int = 1) -> Chart | None:
    """Return a chart with a curve for each name in the records' mappings under `key`, at most COLOURS of them.

    Returns None if there are fewer than `least` names.
    """
    inner = _inner(records, key)
    names = sorted({str(name) for step in inner for name in step})
    drawn = names[:COLOURS]
    unit += f", {len(drawn)} of {len(names)}" if len(names) > len(drawn) else ""
    curves = {name: [number(step.get(name)) for step in inner] for name in drawn}
    return _lines(title, unit, _steps(records), curves) if len(names) >= least else None


def _correct(evals: Sequence[Record], right: str) -> Chart | None:
    """Return a chart of pass@k if tasks were sampled several times, else of the share of correct samples."""
    inner = _inner(evals, "pass_at")
    ks = sorted({str(k) for step in inner for k in step}, key=lambda k: (len(k), k))[:COLOURS]
    if not ks:
        return _line("Evaluation: correct", f"share of samples{right and ', ' + right}", evals, "correct", PERCENT)
    curves = {f"pass@{k}": [number(step.get(k)) for step in inner] for k in ks}
    return _lines(
        "Evaluation: pass@k", f"share of tasks, k tries{right and ', ' + right}", _steps(evals), curves, PERCENT
    )


def _reward(evals: Sequence[Record], rl: Sequence[Record]) -> Chart | None:
    """Return the chart of the reward by step, with the evaluations."""
    x, mean = _steps(rl), _values(rl, "reward")
    band = [_band(r) for r in rl]
    marks = {
        e["name"]: value for e in evals if e["name"] in EVALUATIONS and not math.isnan(value := number(e.get("reward")))
    }
    between = [
        (e["step"], value) for e in evals if e["name"] == "step" and not math.isnan(value := number(e.get("reward")))
    ]
    measured = [value for value in mean if not math.isnan(value)]
    if not measured and not marks:
        return None
    legend = (
        [Legend("mean of a step", 1), Legend("± one standard deviation, within the step's rewards", 1, "band")]
        if measured
        else []
    )
    legend += [Legend("evaluation", 3, "dot")] if between else []
    for name, value in marks.items():
        label, line, colour = EVALUATIONS[name]
        legend.append(Legend(f"{label} {shown(value)}", colour, line))
    everything = [
        *measured,
        *marks.values(),
        *(v for _, v in between),
        *(v for pair in band for v in pair if not math.isnan(v)),
    ]
    down, across = vertical(everything), horizontal([*x, *(step for step, _ in between)])
    shapes = filled(across, down, x, band)
    for name, value in marks.items():
        shapes.append(
            Shape(f"rule {EVALUATIONS[name][1]}", EVALUATIONS[name][2], f"M{LEFT:g} {down.place(value):.1f}H{RIGHT:g}")
        )
    shapes += curve(across, down, x, mean, 1)
    if between:
        shapes.append(dots([(across.place(step), down.place(value)) for step, value in between], 3, "dots big"))
    latest = shown(measured[-1]) if measured else ""
    return chart(("Reward", "mean"), (across, down), shapes, legend, latest, Scale(ticks=bool(x or between)))


def _band(record: Record) -> Point:
    """Return mean ± one standard deviation, limited to the smallest and largest reward of the step."""
    mean, std = number(record.get("reward")), number(record.get("reward_std"))
    least, most = number(record.get("reward_min")), number(record.get("reward_max"))
    low, high = max(-HUGE, mean - std), min(HUGE, mean + std)
    return (low if math.isnan(least) else max(low, least)), (high if math.isnan(most) else min(high, most))


def _phases(rl: Sequence[Record]) -> Chart | None:
    """Return a chart with stacked bars of the seconds of each step."""
    phases = phase_seconds(rl)
    if not any(map(any, phases.values())):
        return None
    width = math.ceil(len(rl) / MAX_BARS)
    slices = [slice(i, i + width) for i in range(0, len(rl), width)]
    at = [sum(r["step"] for r in rl[s]) / len(rl[s]) for s in slices]
    heights = {name: [sum(x / len(seconds[s]) for x in seconds[s]) for s in slices] for name, seconds in phases.items()}
    totals = [min(HUGE, sum(column)) for column in zip(*heights.values(), strict=True)]
    down, across = vertical(totals, from_zero=True), horizontal(_steps(rl), edge=0.5 * width)
    half, base = max(0.5, 0.4 * width * (RIGHT - LEFT) / (across.high - across.low)), [0.0] * len(slices)
    shapes = []
    for position, (name, column) in enumerate(heights.items()):
        top = [min(HUGE, b + h) for b, h in zip(base, column, strict=True)]
        bars = [
            f"M{across.place(x) - half:.1f} {down.place(b):.1f}V{down.place(t):.1f}h{2 * half:.1f}V{down.place(b):.1f}z"
            for x, b, t in zip(at, base, top, strict=True)
            if t > b
        ]
        shapes.append(Shape("bars", phase_colour(name, position), "".join(bars)))
        base = top
    legend = tuple(Legend(name, phase_colour(name, i), "box") for i, name in enumerate(phases))
    unit = "seconds a step" + (f", mean of {width}" if width > 1 else "")
    latest = shown(sum(seconds[-1] for seconds in phases.values()))
    return chart(("Time by phase", unit), (across, down), shapes, legend, latest)
