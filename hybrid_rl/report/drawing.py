"""Axes, curves and bars as SVG paths; the page's template draws them and its CSS chooses the colours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hybrid_rl.report.numbers import short, shown

Curves = dict[str, list[float]]  # label → one value a step, NaN if there is none
Point = tuple[float, float]

COLOURS = 8  # of the CSS variables --c1 … --c8
MAX_POINTS = 800  # of a curve; of more only the lowest and highest at each place are drawn
CURVE = 3  # points that make a curve; fewer are drawn without a line between them
# size of the SVG, and the area inside its axes
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 340.0, 186.0, 48.0, 334.0, 8.0, 150.0
HUGE = 1e308  # the largest value on an axis


@dataclass(frozen=True)
class Legend:
    """An entry of a chart's legend."""

    label: str
    colour: int  # the number of the CSS variable --c1, --c2, …
    line: str = "solid"  # a CSS border style, or "box", "band", "dot"


@dataclass(frozen=True)
class Shape:
    """An SVG path. `kind` is a CSS class of the template: line, dots, band, bars; or rule with a border style."""

    kind: str
    colour: int
    path: str


@dataclass(frozen=True)
class Chart:
    """A chart as the template draws it."""

    title: str
    unit: str
    x_label: str
    x_ticks: Sequence[tuple[str, str]]  # (position, label)
    y_ticks: Sequence[tuple[str, str]]
    shapes: Sequence[Shape]
    legend: tuple[Legend, ...] = ()
    latest: str = ""  # the newest value, to read without the axis


@dataclass(frozen=True)
class Axis:
    """A mapping of values from `low` to `high` onto positions from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        """Return the position of a value."""
        # halves, so that a difference is never infinite
        low, high, at = (math.log10(v) if self.log else v / 2 for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * ((at - low) / (high - low))

    def values(self, most: int = 5, whole: bool = False) -> list[float]:
        """Return about `most` round values on the axis, or fewer; `whole` allows integers only."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            return [10.0**power for power in range(first, last + 1, max(1, math.ceil((last - first) / most)))]
        raw = self.high / most - self.low / most
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
        step = max(1.0, round(step)) if whole else step
        return [i * step for i in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Scale:
    """How the axes of a chart run, and how their values are shown."""

    x_label: str = "RL step"
    from_zero: bool = False
    percent: bool = False
    log: bool = False
    ticks: bool = True  # on the axis of steps


PLAIN, FROM_ZERO, PERCENT = Scale(), Scale(from_zero=True), Scale(percent=True)


def finite(curves: Curves) -> list[float]:
    """Return the values of all curves that are not NaN, in order."""
    return [value for values in curves.values() for value in values if not math.isnan(value)]


def vertical(values: Sequence[float], from_zero: bool = False, log: bool = False, default: float = 1.0) -> Axis:
    """Return a vertical axis for the values, with a margin.

    With `from_zero` it starts at 0 if no value is negative, and ends at `default` if all values are 0.
    """
    low, high = max(-HUGE, min(values)), min(HUGE, max(values))
    if log:
        low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** min(308, math.ceil(math.log10(high)))
        low = low or 1e-307
        return Axis(low, high if high > low else 10 * low, BOTTOM, TOP, log=True)
    if from_zero and low >= 0:
        return Axis(0.0, min(HUGE, 1.1 * high) if high > 1e-300 else default, BOTTOM, TOP)
    if high - low <= 1e-12 * max(abs(low), abs(high)):  # all equal up to rounding
        margin = 0.1 * abs(high) if abs(high) > 1e-300 else default
    else:
        margin = 0.05 * high - 0.05 * low
    return Axis(max(-HUGE, low - margin), min(HUGE, high + margin), BOTTOM, TOP)


def horizontal(x: Sequence[int], edge: float = 0.0) -> Axis:
    """Return the axis of the steps `x`, with `edge` more steps on each side; a single step is in the middle."""
    low, high = (min(x) - edge, max(x) + edge) if x else (0.0, 1.0)
    if high - low < 2:
        low, high = (low + high) / 2 - 1, (low + high) / 2 + 1
    return Axis(low, high, LEFT + 4, RIGHT - 4)


def curve(across: Axis, down: Axis, x: Sequence[int], y: Sequence[float], colour: int) -> list[Shape]:
    """Return a line through the measured points, broken at gaps, if there are at least CURVE points.

    Points are also drawn as dots when there are at most 30 steps, or when a point lies alone between two gaps.
    """
    runs = list(_runs([(across.place(step), down.place(value)) for step, value in zip(x, y, strict=True)]))
    count = sum(map(len, runs))
    shapes = []
    if count >= CURVE:
        shapes.append(Shape("line", colour, "".join(_path(_thinned(run)) for run in runs if len(run) > 1)))
    if len(x) <= 30 or len(runs) > 1:  # a point between two gaps has no line
        alone = [p for run in runs for p in (run if len(x) <= 30 else run[:1] if len(run) == 1 else [])]
        shapes.append(dots(alone, colour))
    return [shape for shape in shapes if shape.path]


def filled(across: Axis, down: Axis, x: Sequence[int], band: Sequence[Point], colour: int = 1) -> list[Shape]:
    """Return the area between the pairs of a band."""
    edges = [
        [(across.place(step), down.place(pair[side])) for step, pair in zip(x, band, strict=True)] for side in (0, 1)
    ]
    gaps = [math.isnan(low[1]) or math.isnan(high[1]) for low, high in zip(*edges, strict=True)]
    low, high = ([(px, math.nan if gap else py) for (px, py), gap in zip(edge, gaps, strict=True)] for edge in edges)
    areas = zip(_runs(low), _runs(high), strict=True)
    path = "".join(f"{_path([*_thinned(a), *reversed(_thinned(b))])}z" for a, b in areas)
    return [Shape("band", colour, path)] if not all(gaps) else []


def _runs(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Yield the parts of a curve between its gaps."""
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
    """Return at most the first, lowest, highest and last point at each position if there are more than MAX_POINTS."""
    if len(run) <= MAX_POINTS:
        return run
    columns: dict[int, list[Point]] = {}
    for point in run:
        columns.setdefault(round(point[0]), []).append(point)
    kept = (sorted({c[0], min(c, key=lambda p: p[1]), max(c, key=lambda p: p[1]), c[-1]}) for c in columns.values())
    return [point for column in kept for point in column]


def _path(run: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in run)


def dots(points: Sequence[Point], colour: int, kind: str = "dots") -> Shape:
    """Return dots: lines of length 0, which are drawn with round ends."""
    return Shape(kind, colour, "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points))


def chart(
    heading: tuple[str, str],
    axes: tuple[Axis, Axis],
    shapes: Sequence[Shape],
    legend: Sequence[Legend] = (),
    latest: str = "",
    scale: Scale = PLAIN,
) -> Chart:
    """Return a chart with ticks; `heading` is (title, unit), `axes` are the horizontal and the vertical one."""
    across, down = axes
    x_ticks = [(f"{across.place(v):.1f}", _tick(v)) for v in across.values(6, whole=True)] if scale.ticks else []
    y_ticks = [(f"{down.place(v):.1f}", shown(v, percent=True) if scale.percent else _tick(v)) for v in down.values()]
    return Chart(*heading, scale.x_label, x_ticks, y_ticks, shapes, tuple(legend), latest)


def _tick(value: float) -> str:
    text = f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else short(value, 4)
    return text.replace("-", "\N{MINUS SIGN}")
