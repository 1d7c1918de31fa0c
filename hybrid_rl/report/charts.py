"""The report's charts: small inline SVGs of one size, whose text stays text and whose colours the page's CSS decides.

Titles and legends are the page's HTML, so that no text of a run ever enters an SVG. matplotlib is loaded on first use.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = dict[str, Any]
Draw = Callable[["Axes"], None]
Curves = dict[str, list[float]]  # label → one value a step, NaN where there is none

PHASES = ("rollout", "sleep", "update", "handover", "evaluate", "checkpoint")  # first, so that each keeps its colour in every report
EVALUATIONS = {
    "model": ("the model", "dotted", 6),
    "base": ("base", "dotted", 6),
    "sft": ("after SFT", "dashed", 2),
    "rl": ("after RL", "solid", 3),
}  # label, line, colour
CLIPPED = {"clip_fraction": "low and high", "clip_low": "low side", "clip_high": "high side", "clip_dual": "dual clip"}
QUANTILES = {"p50": "median", "p01": "1st percentile", "p99": "99th percentile", "max": "largest"}
MAX_BARS = 60  # of a stacked chart; more steps are averaged

# matplotlib wants real colours: these stand for the CSS variables --c0 … --c9 and are replaced in the finished SVG.
COLOURS = [f"#0a0c{number:02d}" for number in range(10)]
INK, GRID, SERIES = COLOURS[0], COLOURS[9], COLOURS[1:9]
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10, "text.parse_math": False, "text.color": INK,
    "axes.edgecolor": GRID, "axes.labelcolor": INK, "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "grid.color": GRID, "grid.linewidth": 0.6,
    "xtick.color": GRID, "ytick.color": GRID, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "ytick.major.size": 0,
    "lines.markersize": 3, "savefig.transparent": True,
}  # fmt: skip


@dataclass(frozen=True)
class Legend:
    label: str
    colour: int  # of the CSS variable --c<colour>
    line: str = "solid"  # a CSS border style, or "box", "band", "dot"


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    svg: str  # safe to put into a page as it is
    legend: tuple[Legend, ...] = ()
    latest: str = ""  # the newest value, to read without the axis


def number(value: object) -> float:
    """The value as a float; NaN for whatever is not a finite number, so that a chart shows a gap and a table a dash."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return math.nan
    return float(value)


def shown(value: object, percent: bool = False) -> str:
    """A number for people: three significant digits, thousands separated, a dash where there is none."""
    x = number(value)
    if math.isnan(x):
        return "–"
    if percent:
        return f"{100 * x:.3g} %"
    return f"{x:,.0f}" if abs(x) >= 1000 else re.sub(r"e-0*", "e-", f"{x:.3g}")


def learning_charts(sft: Sequence[Record], evals: Sequence[Record], rl: Sequence[Record]) -> list[Chart]:
    """Reward by step with the evaluations, by its parts and by source, what evaluations find right, and the SFT loss."""
    at_steps = _one_a_step(evals)
    charts = (
        _reward(evals, rl),
        _named("Parts of the reward", "mean", rl, "parts"),
        _named("Reward by source", "mean", rl, "sources"),
        _correct(at_steps),
        _named("Evaluation by source", "mean reward", at_steps, "sources"),
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
    return {name: [0.0 if math.isnan(x := number(step.get(name))) else max(x, 0.0) for step in steps] for name in ordered}


def phase_colour(name: str, position: int) -> int:
    return 1 + (PHASES.index(name) if name in PHASES else position) % len(SERIES)


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


def _plot(axes: Axes, x: Sequence[int], y: Sequence[float], colour: int) -> None:
    # A point between two gaps has no line to be seen by, so short or broken curves get marks.
    sparse = len(x) <= 30 or any(math.isnan(value) for value in y)
    axes.plot(x, y, color=COLOURS[colour], marker="o" if sparse else None, linewidth=1.5 if len(x) <= 300 else 0.7)


def _line(
    title: str, unit: str, records: Sequence[Record], key: str, xlabel: str = "RL step",
    from_zero: bool = False, percent: bool = False, log: bool = False,
) -> Chart | None:  # fmt: skip
    return _lines(title, unit, _steps(records), {"": _values(records, key)}, xlabel, from_zero, percent, log)


def _lines(
    title: str, unit: str, x: Sequence[int], curves: Curves, xlabel: str = "RL step",
    from_zero: bool = False, percent: bool = False, log: bool = False,
) -> Chart | None:  # fmt: skip
    """A curve for each label, its newest value in the legend, or beside the title where it has no label. None without a finite value."""
    finite = _finite(curves)
    if not finite:
        return None

    def draw(axes: Axes) -> None:
        for position, y in enumerate(curves.values()):
            _plot(axes, x, y, 1 + position)
        low, high = min(finite), max(finite)
        if log:
            low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
            axes.set_yscale("log")
            axes.set_ylim(low, high if high > low else 10 * low)
            axes.minorticks_off()
        elif (from_zero or percent) and low >= 0:
            axes.set_ylim(0, 1.1 * high or (0.1 if percent else 1.0))

    newest = {label: shown(found[-1] if (found := _finite({"": y})) else math.nan, percent) for label, y in curves.items()}
    legend = tuple(Legend(f"{label} {newest[label]}", 1 + position) for position, label in enumerate(curves) if label)
    return Chart(title, unit, _svg(title, draw, xlabel, percent), legend, newest.get("", ""))


def _ratios(title: str, unit: str, rl: Sequence[Record], prefix: str) -> Chart | None:
    """Quantiles of a ratio of probabilities, whose largest may be anything."""
    curves = _fixed(rl, {f"{prefix}_{name}": label for name, label in QUANTILES.items()})
    finite = _finite(curves)
    wide = bool(finite) and min(finite) > 0 and max(finite) > 10
    return _lines(title, unit + (", log scale" if wide else ""), _steps(rl), curves, log=wide)


def _named(title: str, unit: str, records: Sequence[Record], key: str) -> Chart | None:
    """A curve for each name in the mappings under a key, as far as there are colours."""
    inner = _inner(records, key)
    names = sorted({str(name) for step in inner for name in step})
    drawn = names[: len(SERIES)]
    unit += f", {len(drawn)} of {len(names)}" if len(names) > len(drawn) else ""
    return _lines(title, unit, _steps(records), {name: [number(step.get(name)) for step in inner] for name in drawn})


def _correct(evals: Sequence[Record]) -> Chart | None:
    """pass@k where a task was sampled several times, else the share of right samples."""
    inner = _inner(evals, "pass_at")
    ks = sorted({str(k) for step in inner for k in step}, key=lambda k: (len(k), k))[: len(SERIES)]
    if not ks:
        return _line("Evaluation: correct", "share of samples", evals, "correct", percent=True)
    curves = {f"pass@{k}": [number(step.get(k)) for step in inner] for k in ks}
    return _lines("Evaluation: pass@k", "share of tasks, k tries", _steps(evals), curves, percent=True)


def _reward(evals: Sequence[Record], rl: Sequence[Record]) -> Chart | None:
    x, mean, spread = _steps(rl), _values(rl, "reward"), _values(rl, "reward_std")
    marks = {e["name"]: value for e in evals if e["name"] in EVALUATIONS and not math.isnan(value := number(e.get("reward")))}
    between = [(e["step"], number(e.get("reward"))) for e in evals if e["name"] == "step"]
    finite = [value for value in mean if not math.isnan(value)]
    if not finite and not marks:
        return None
    legend = [Legend("mean of a step", 1), Legend("± one standard deviation", 1, "band")] if finite else []
    legend += [Legend("evaluation", 3, "dot")] if between else []
    for name, value in marks.items():
        label, line, colour = EVALUATIONS[name]
        legend.append(Legend(f"{label} {shown(value)}", colour, line))

    def draw(axes: Axes) -> None:
        low, high = [m - s for m, s in zip(mean, spread, strict=True)], [m + s for m, s in zip(mean, spread, strict=True)]
        axes.fill_between(x, low, high, color=COLOURS[1], alpha=0.18, linewidth=0)
        for name, value in marks.items():
            axes.axhline(value, color=COLOURS[EVALUATIONS[name][2]], linestyle=EVALUATIONS[name][1], linewidth=1.2)
        _plot(axes, x, mean, 1)
        if between:
            axes.plot(*zip(*between, strict=True), "o", color=COLOURS[3], markersize=4.5 if len(between) <= 40 else 2.5)
        if not x:
            axes.set_xticks([])

    return Chart("Reward", "mean", _svg("Reward", draw), tuple(legend), shown(finite[-1]) if finite else "")


def _phases(rl: Sequence[Record]) -> Chart | None:
    phases = phase_seconds(rl)
    if not any(map(any, phases.values())):
        return None
    width = math.ceil(len(rl) / MAX_BARS)
    starts = range(0, len(rl), width)

    def draw(axes: Axes) -> None:
        base = [0.0] * len(starts)
        at = [sum(r["step"] for r in rl[i : i + width]) / len(rl[i : i + width]) for i in starts]
        for position, (name, seconds) in enumerate(phases.items()):
            height = [sum(seconds[i : i + width]) / len(seconds[i : i + width]) for i in starts]
            bars = [bar for bar in zip(at, height, base, strict=True) if bar[1] > 0]
            axes.bar(
                [b[0] for b in bars], [b[1] for b in bars], bottom=[b[2] for b in bars],
                width=0.8 * width, color=COLOURS[phase_colour(name, position)], linewidth=0,
            )  # fmt: skip
            base = [b + h for b, h in zip(base, height, strict=True)]

    legend = tuple(Legend(name, phase_colour(name, i), "box") for i, name in enumerate(phases))
    unit = "seconds a step" + (f", mean of {width}" if width > 1 else "")
    latest = shown(sum(seconds[-1] for seconds in phases.values()))
    return Chart("Time by phase", unit, _svg("Phases", draw), legend, latest)


def _svg(name: str, draw: Draw, xlabel: str = "RL step", percent: bool = False) -> str:
    """Draw into an SVG element that fits a page: same bytes for the same data, and `name` keeps its ids apart from other charts'."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's own matplotlibrc must not change a report
        matplotlib.rcParams.update(STYLE | {"svg.hashsalt": f"hybrid_rl {name}"})
        figure = Figure(figsize=(4.6, 2.5))
        axes = figure.add_axes((0.14, 0.195, 0.84, 0.75))
        draw(axes)
        axes.set_xlabel(xlabel, labelpad=3)
        if len(axes.get_xticks()):
            left, right = axes.get_xlim()
            if right - left < 1:  # a single step
                axes.set_xlim(round((left + right) / 2) - 1, round((left + right) / 2) + 1)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
        if axes.get_yscale() == "linear":
            axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _tick(100 * y) + " %" if percent else _tick(y)))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return _inline(buffer.getvalue())


def _tick(value: float) -> str:
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return re.sub(r"e([+-])0*", r"e\1", text).replace("e+", "e").replace("-", "\N{MINUS SIGN}")


def _inline(svg: str) -> str:
    """An SVG file as an element of an HTML page: no prologue, metadata, namespaces, ids of groups or style of its own."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    head, body = svg.split(">", 1)
    head = re.sub(r'\s(xmlns(:\w+)?|version|width|height)="[^"]*"', "", head) + ' aria-hidden="true"'
    body = re.sub(r'<g id="[^"]*"', "<g", body).replace("xlink:href", "href")
    return re.sub(r"#0a0c0(\d)", r"var(--c\1)", f"{head}>{body}").strip()
