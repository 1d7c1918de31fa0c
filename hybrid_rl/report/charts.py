"""The report's charts as paths to draw: the template turns them into small inline SVGs, whose colours the page's CSS decides.

Every text stays text, and passes through the template's escaping like all else that a run wrote.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]
Curves = dict[str, list[float]]  # label → one value a step, NaN where there is none
Point = tuple[float, float]

PHASES = (
    "rollout",
    "sleep",
    "update",
    "handover",
    "evaluate",
    "checkpoint",
)  # first, so that each keeps its colour in every report
EVALUATIONS = {
    "model": ("the model", "dotted", 6),
    "base": ("base", "dotted", 6),
    "sft": ("after SFT", "dashed", 2),
    "rl": ("after RL", "solid", 3),
}  # label, line, colour
CLIPPED = {"clip_fraction": "low and high", "clip_low": "low side", "clip_high": "high side", "clip_dual": "dual clip"}
GROUPS = {"silent_groups": "silent, replaced", "missing_groups": "missing from the batch"}
QUANTILES = {"p50": "median", "p01": "1st percentile", "p99": "99th percentile", "max": "largest"}
COLOURS = 8  # of the CSS variables --c1 … --c8
MAX_BARS = 60  # of a stacked chart; more steps are averaged
MAX_POINTS = 800  # of a curve; of more only the lowest and highest at a place are drawn
CURVE = 3  # points that make a curve: fewer are drawn without a line between them
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = (
    340.0,
    186.0,
    48.0,
    334.0,
    8.0,
    150.0,
)  # of the SVG, and of the area of its axes
HUGE = 1e308  # an axis ends here


@dataclass(frozen=True)
class Legend:
    label: str
    colour: int  # of the CSS variable --c<colour>
    line: str = "solid"  # a CSS border style, or "box", "band", "dot"


@dataclass(frozen=True)
class Shape:
    """`kind` is a CSS class of the template: line, dots, band, bars; or rule with a border style."""

    kind: str
    colour: int
    path: str


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    x_label: str
    x_ticks: Sequence[tuple[str, str]]  # (place, label)
    y_ticks: Sequence[tuple[str, str]]
    shapes: Sequence[Shape]
    legend: tuple[Legend, ...] = ()
    latest: str = ""  # the newest value, to read without the axis


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` to places from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        low, high, at = (
            math.log10(v) if self.log else v / 2 for v in (self.low, self.high, value)
        )  # halves: a difference is never infinite
        return self.start + (self.end - self.start) * ((at - low) / (high - low))

    def values(self, most: int = 5, whole: bool = False) -> list[float]:
        """At most about `most` round values on the axis."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            return [10.0**power for power in range(first, last + 1, max(1, math.ceil((last - first) / most)))]
        raw = self.high / most - self.low / most
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
        step = max(1.0, round(step)) if whole else step
        return [i * step for i in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]


def number(value: object) -> float:
    """The value as a float; NaN for whatever is not a finite number, so that a chart shows a gap and a table a dash."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:  # a whole number beyond floats
        return math.nan


def shown(value: object, percent: bool = False) -> str:
    """A number for people: three significant digits, thousands separated, a dash where there is none."""
    x = number(value)
    if percent:
        return f"{_short(100 * x)} %" if math.isfinite(100 * x) else "–"
    if math.isnan(x):
        return "–"
    return f"{x:,.0f}" if 1000 <= abs(x) < 1e9 else _short(x)


def _short(x: float, digits: int = 3) -> str:
    return re.sub(r"e([+-])0*", r"e\1", f"{x:.{digits}g}").replace("e+", "e")


def learning_charts(sft: Sequence[Record], evals: Sequence[Record], rl: Sequence[Record], right: str) -> list[Chart]:
    """Reward by step with the evaluations, by its parts and by source, what evaluations find right (`right` says when), rates, and the SFT loss."""
    at_steps = _one_a_step(evals)
    charts = (
        _reward(evals, rl),
        _named("Parts of the reward", "mean", rl, "parts", least=2),
        _named("Reward by source", "mean", rl, "sources"),
        _correct(at_steps, right),
        _named("Evaluation by source", "mean reward", at_steps, "sources"),
        _line("Learning rate", "of the policy", rl, "lr", from_zero=True),
        _line("SFT loss", "nats a token", sft, "loss", "SFT step"),
    )
    return [chart for chart in charts if chart]


def health_charts(rl: Sequence[Record]) -> list[Chart]:
    """What tells a sound RL stage from a sick one."""
    kl = [number(r.get("mismatch_kl")) for r in rl]
    positive = any(x > 0 for x in kl) and not any(x <= 0 for x in kl)
    charts = (
        _line("Completion length", "tokens, mean", rl, "length", from_zero=True),
        _line("Truncated", "share of completions", rl, "truncated", percent=True),
        _line("Repetition", "share of 4-grams", rl, "repetition", percent=True),
        _lines("Groups without a signal", "number", _steps(rl), _fixed(rl, GROUPS), from_zero=True),
        _line("Entropy", "nats a token", rl, "entropy", from_zero=True),
        _line("Mismatch KL", "nats, log scale" if positive else "nats a token", rl, "mismatch_kl", log=positive),
        _line("Reference KL", "nats a token", rl, "reference_kl", from_zero=True),
        _line("KL coefficient", "weight of the reference KL", rl, "kl_coef", from_zero=True),
        _lines("Clip fraction", "share of tokens", _steps(rl), _fixed(rl, CLIPPED), percent=True),
        _ratios("Probability ratio", "new to old", rl, "ratio"),
        _ratios("Mismatch ratio", "trainer to engine, before correction", rl, "correction"),
        _line("Dropped", "share of tokens, by a correction", rl, "dropped", percent=True),
        _line("Advantage", "standard deviation", rl, "advantage_std", from_zero=True),
        _line("Critic loss", "mean", rl, "value_loss", from_zero=True),
        _line("Explained variance", "of returns, by the critic", rl, "explained_variance"),
        _line("Gradient norm", "before clipping", rl, "grad_norm", from_zero=True),
    )
    return [chart for chart in charts if chart]


def speed_charts(rl: Sequence[Record]) -> list[Chart]:
    """Where the time and the memory go."""
    charts = (
        _phases(rl),
        _line("Throughput", "tokens a second", rl, "tokens_per_second", from_zero=True),
        _line("Peak memory", "GiB", rl, "memory_gib", from_zero=True),
    )
    return [chart for chart in charts if chart]


def phase_seconds(rl: Sequence[Record]) -> dict[str, list[float]]:
    """Seconds by phase, one entry a step, 0 where a step does not name the phase; the known phases first."""
    steps = [r["seconds"] if isinstance(r.get("seconds"), dict) else {} for r in rl]
    names = {str(name) for step in steps for name in step}
    ordered = [name for name in PHASES if name in names] + sorted(names.difference(PHASES))
    return {
        name: [0.0 if math.isnan(x := number(step.get(name))) else max(x, 0.0) for step in steps] for name in ordered
    }


def phase_colour(name: str, position: int) -> int:
    return 1 + (PHASES.index(name) if name in PHASES else position) % COLOURS


def _steps(records: Sequence[Record]) -> list[int]:
    return [r["step"] for r in records]


def _values(records: Sequence[Record], key: str) -> list[float]:
    return [number(r.get(key)) for r in records]


def _fixed(records: Sequence[Record], labels: Mapping[str, str]) -> Curves:
    """Label → values of the keys that are there; the first alone needs no label."""
    found = {key: values for key in labels if _finite({"": (values := _values(records, key))})}
    return {"" if list(found) == list(labels)[:1] else labels[key]: values for key, values in found.items()}


def _inner(records: Sequence[Record], key: str) -> list[Record]:
    """The mapping that each record has under a key, {} where it has none."""
    return [inner if isinstance(inner := r.get(key), dict) else {} for r in records]


def _finite(curves: Curves) -> list[float]:
    return [value for values in curves.values() for value in values if not math.isnan(value)]


def _one_a_step(evals: Sequence[Record]) -> list[Record]:
    """The evaluations in order of steps; of two before the first step, the one after SFT."""
    known = ("model", "base", "sft", "step", "rl")
    ordered = sorted((e for e in evals if e["name"] in known), key=lambda e: known.index(e["name"]))
    newest = {e["step"]: e for e in ordered}
    return [newest[step] for step in sorted(newest)]


def _line(
    title: str, unit: str, records: Sequence[Record], key: str, x_label: str = "RL step",
    from_zero: bool = False, percent: bool = False, log: bool = False,
) -> Chart | None:  # fmt: skip
    return _lines(title, unit, _steps(records), {"": _values(records, key)}, x_label, from_zero, percent, log)


def _lines(
    title: str, unit: str, x: Sequence[int], curves: Curves, x_label: str = "RL step",
    from_zero: bool = False, percent: bool = False, log: bool = False,
) -> Chart | None:  # fmt: skip
    """A curve for each label, its newest value in the legend, or beside the title where it has no label. None without a finite value."""
    finite = _finite(curves)
    if not finite:
        return None
    down, across = _vertical(finite, from_zero or percent, log, 0.1 if percent else 1.0), _across(x)
    shapes = [shape for position, y in enumerate(curves.values()) for shape in _curve(across, down, x, y, 1 + position)]
    newest = {
        label: shown(found[-1] if (found := _finite({"": y})) else math.nan, percent) for label, y in curves.items()
    }
    legend = tuple(Legend(f"{label} {newest[label]}", 1 + position) for position, label in enumerate(curves) if label)
    return _chart(title, unit, across, down, shapes, legend, newest.get("", ""), x_label, percent)


def _ratios(title: str, unit: str, rl: Sequence[Record], prefix: str) -> Chart | None:
    """Quantiles of a ratio of probabilities, whose largest may be anything."""
    curves = _fixed(rl, {f"{prefix}_{name}": label for name, label in QUANTILES.items()})
    finite = _finite(curves)
    wide = bool(finite) and min(finite) > 0 and max(finite) > 10
    return _lines(title, unit + (", log scale" if wide else ""), _steps(rl), curves, log=wide)


def _named(title: str, unit: str, records: Sequence[Record], key: str, least: int = 1) -> Chart | None:
    """A curve for each name in the mappings under a key, as far as there are colours; None with fewer than `least` names."""
    inner = _inner(records, key)
    names = sorted({str(name) for step in inner for name in step})
    drawn = names[:COLOURS]
    unit += f", {len(drawn)} of {len(names)}" if len(names) > len(drawn) else ""
    curves = {name: [number(step.get(name)) for step in inner] for name in drawn}
    return _lines(title, unit, _steps(records), curves) if len(names) >= least else None


def _correct(evals: Sequence[Record], right: str) -> Chart | None:
    """pass@k where a task was sampled several times, else the share of right samples."""
    inner = _inner(evals, "pass_at")
    ks = sorted({str(k) for step in inner for k in step}, key=lambda k: (len(k), k))[:COLOURS]
    if not ks:
        return _line("Evaluation: correct", f"share of samples{right and ', ' + right}", evals, "correct", percent=True)
    curves = {f"pass@{k}": [number(step.get(k)) for step in inner] for k in ks}
    return _lines(
        "Evaluation: pass@k", f"share of tasks, k tries{right and ', ' + right}", _steps(evals), curves, percent=True
    )


def _reward(evals: Sequence[Record], rl: Sequence[Record]) -> Chart | None:
    x, mean = _steps(rl), _values(rl, "reward")
    band = [_band(r) for r in rl]
    marks = {
        e["name"]: value for e in evals if e["name"] in EVALUATIONS and not math.isnan(value := number(e.get("reward")))
    }
    between = [
        (e["step"], value) for e in evals if e["name"] == "step" and not math.isnan(value := number(e.get("reward")))
    ]
    finite = [value for value in mean if not math.isnan(value)]
    if not finite and not marks:
        return None
    legend = (
        [Legend("mean of a step", 1), Legend("± one standard deviation, within the step's rewards", 1, "band")]
        if finite
        else []
    )
    legend += [Legend("evaluation", 3, "dot")] if between else []
    for name, value in marks.items():
        label, line, colour = EVALUATIONS[name]
        legend.append(Legend(f"{label} {shown(value)}", colour, line))
    everything = [
        *finite,
        *marks.values(),
        *(v for _, v in between),
        *(v for pair in band for v in pair if not math.isnan(v)),
    ]
    down, across = _vertical(everything), _across([*x, *(step for step, _ in between)])
    shapes = _filled(across, down, x, band)
    for name, value in marks.items():
        shapes.append(
            Shape(f"rule {EVALUATIONS[name][1]}", EVALUATIONS[name][2], f"M{LEFT:g} {down.place(value):.1f}H{RIGHT:g}")
        )
    shapes += _curve(across, down, x, mean, 1)
    if between:
        shapes.append(_dots([(across.place(step), down.place(value)) for step, value in between], 3, "dots big"))
    return _chart(
        "Reward",
        "mean",
        across,
        down,
        shapes,
        tuple(legend),
        shown(finite[-1]) if finite else "",
        ticks=bool(x or between),
    )


def _band(record: Record) -> Point:
    """Mean ± one standard deviation, cut at the least and the largest reward of the step, which it would otherwise leave."""
    mean, std = number(record.get("reward")), number(record.get("reward_std"))
    least, most = number(record.get("reward_min")), number(record.get("reward_max"))
    low, high = max(-HUGE, mean - std), min(HUGE, mean + std)
    return (low if math.isnan(least) else max(low, least)), (high if math.isnan(most) else min(high, most))


def _phases(rl: Sequence[Record]) -> Chart | None:
    """Stacked bars of a step's seconds."""
    phases = phase_seconds(rl)
    if not any(map(any, phases.values())):
        return None
    width = math.ceil(len(rl) / MAX_BARS)
    slices = [slice(i, i + width) for i in range(0, len(rl), width)]
    at = [sum(r["step"] for r in rl[s]) / len(rl[s]) for s in slices]
    heights = {name: [sum(x / len(seconds[s]) for x in seconds[s]) for s in slices] for name, seconds in phases.items()}
    totals = [min(HUGE, sum(column)) for column in zip(*heights.values(), strict=True)]
    down, across = _vertical(totals, from_zero=True), _across(_steps(rl), edge=0.5 * width)
    half, base = max(0.5, 0.4 * width * (RIGHT - LEFT) / (across.high - across.low)), [0.0] * len(slices)
    shapes = []
    for position, (name, column) in enumerate(heights.items()):
        top = [min(HUGE, b + h) for b, h in zip(base, column, strict=True)]
        bars = [
            f"M{across.place(x) - half:.1f} {down.place(b):.1f}V{down.place(t):.1f}h{2 * half:.1f}V{down.place(b):.1f}z"
            for x, b, t in zip(at, base, top, strict=True) if t > b
        ]  # fmt: skip
        shapes.append(Shape("bars", phase_colour(name, position), "".join(bars)))
        base = top
    legend = tuple(Legend(name, phase_colour(name, i), "box") for i, name in enumerate(phases))
    unit = "seconds a step" + (f", mean of {width}" if width > 1 else "")
    latest = shown(sum(seconds[-1] for seconds in phases.values()))
    return _chart("Time by phase", unit, across, down, shapes, legend, latest)


# ---- axes and paths ------------------------------------------------------------------------------------------------


def _vertical(values: Sequence[float], from_zero: bool = False, log: bool = False, default: float = 1.0) -> Axis:
    """An axis that the values fit on, with some air; from 0 on request, where no value is below it, and then to `default` if all are 0."""
    low, high = max(-HUGE, min(values)), min(HUGE, max(values))
    if log:
        low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** min(308, math.ceil(math.log10(high)))
        low = low or 1e-307
        return Axis(low, high if high > low else 10 * low, BOTTOM, TOP, log=True)
    if from_zero and low >= 0:
        return Axis(0.0, min(HUGE, 1.1 * high) if high > 1e-300 else default, BOTTOM, TOP)
    if high - low <= 1e-12 * max(abs(low), abs(high)):  # all equal, but for rounding
        air = 0.1 * abs(high) if abs(high) > 1e-300 else default
    else:
        air = 0.05 * high - 0.05 * low
    return Axis(max(-HUGE, low - air), min(HUGE, high + air), BOTTOM, TOP)


def _across(x: Sequence[int], edge: float = 0.0) -> Axis:
    """The axis of steps, `edge` of them more on each side; a single step is in its middle."""
    low, high = (min(x) - edge, max(x) + edge) if x else (0.0, 1.0)
    return (
        Axis(low, high, LEFT + 4, RIGHT - 4)
        if high - low >= 2
        else Axis((low + high) / 2 - 1, (low + high) / 2 + 1, LEFT + 4, RIGHT - 4)
    )


def _curve(across: Axis, down: Axis, x: Sequence[int], y: Sequence[float], colour: int) -> list[Shape]:
    """A line through what was measured, broken at gaps; short or broken curves have dots, and CURVE points are the least for a line."""
    runs = list(_runs([(across.place(step), down.place(value)) for step, value in zip(x, y, strict=True)]))
    count = sum(map(len, runs))
    shapes = []
    if count >= CURVE:
        shapes.append(Shape("line", colour, "".join(_path(_thinned(run)) for run in runs if len(run) > 1)))
    if len(x) <= 30 or len(runs) > 1:  # a point between two gaps has no line to be seen by
        alone = [p for run in runs for p in (run if len(x) <= 30 else run[:1] if len(run) == 1 else [])]
        shapes.append(_dots(alone, colour))
    return [shape for shape in shapes if shape.path]


def _filled(across: Axis, down: Axis, x: Sequence[int], band: Sequence[Point]) -> list[Shape]:
    """The area between the pairs of a band."""
    edges = [
        [(across.place(step), down.place(pair[side])) for step, pair in zip(x, band, strict=True)] for side in (0, 1)
    ]
    gaps = [math.isnan(low[1]) or math.isnan(high[1]) for low, high in zip(*edges, strict=True)]
    low, high = ([(px, math.nan if gap else py) for (px, py), gap in zip(edge, gaps, strict=True)] for edge in edges)
    areas = zip(_runs(low), _runs(high), strict=True)
    return (
        [Shape("band", 1, "".join(f"{_path([*_thinned(a), *reversed(_thinned(b))])}z" for a, b in areas))]
        if not all(gaps)
        else []
    )


def _runs(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Parts of a curve without a gap."""
    run: list[Point] = []
    for point in points:
        if not math.isnan(point[1]):
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _thinned(run: list[Point]) -> list[Point]:
    """Of more points than the eye can tell apart the first, lowest, highest and last at each place."""
    if len(run) <= MAX_POINTS:
        return run
    columns: dict[int, list[Point]] = {}
    for point in run:
        columns.setdefault(round(point[0]), []).append(point)
    kept = (sorted({c[0], min(c, key=lambda p: p[1]), max(c, key=lambda p: p[1]), c[-1]}) for c in columns.values())
    return [point for column in kept for point in column]


def _path(run: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in run)


def _dots(points: Sequence[Point], colour: int, kind: str = "dots") -> Shape:
    """Lines of no length, whose round ends are seen."""
    return Shape(kind, colour, "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points))


def _chart(
    title: str, unit: str, across: Axis, down: Axis, shapes: Sequence[Shape], legend: tuple[Legend, ...], latest: str,
    x_label: str = "RL step", percent: bool = False, ticks: bool = True,
) -> Chart:  # fmt: skip
    x_ticks = [(f"{across.place(v):.1f}", _tick(v)) for v in across.values(6, whole=True)] if ticks else []
    y_ticks = [(f"{down.place(v):.1f}", shown(v, percent=True) if percent else _tick(v)) for v in down.values()]
    return Chart(title, unit, x_label, x_ticks, y_ticks, shapes, legend, latest)


def _tick(value: float) -> str:
    text = f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else _short(value, 4)
    return text.replace("-", "\N{MINUS SIGN}")
