"""Compare runs: what differs in their settings, means over seeds with intervals, paired tests, and curves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from hybrid_rl.report.charts import Record
from hybrid_rl.report.console import visible
from hybrid_rl.report.drawing import (
    COLOURS,
    FROM_ZERO,
    PERCENT,
    PLAIN,
    Chart,
    Legend,
    Scale,
    chart,
    curve,
    filled,
    horizontal,
    vertical,
)
from hybrid_rl.report.intervals import interval, paired
from hybrid_rl.report.numbers import number, shown
from hybrid_rl.report.read import Run, mapping, read_run, text
from hybrid_rl.report.templates import templates

LAST = 10  # RL steps that a final value is the mean of
# settings that do not make a run another experiment
IGNORED = ("seed", "resume", "output_dir", "dry_run", "tracker", "sweep", "console")
# key → title, unit, scale
CURVES: dict[str, tuple[str, str, Scale]] = {
    "reward": ("Reward", "mean of a step", PLAIN),
    "length": ("Completion length", "tokens, mean", FROM_ZERO),
    "truncated": ("Truncated", "share of completions", PERCENT),
    "entropy": ("Entropy", "nats a token", FROM_ZERO),
    "mismatch_kl": ("Mismatch KL", "nats a token", FROM_ZERO),
    "reference_kl": ("Reference KL", "nats a token", FROM_ZERO),
    "clip_fraction": ("Clip fraction", "share of tokens", PERCENT),
    "grad_norm": ("Gradient norm", "before clipping", FROM_ZERO),
    "tokens_per_second": ("Throughput", "tokens a second", FROM_ZERO),
}
FINAL = {"reward": "RL reward", "length": "length", "entropy": "entropy", "tokens_per_second": "tokens/s"}


@dataclass(frozen=True)
class Group:
    """Runs whose settings are equal but for the seed, in order of seeds."""

    label: str
    settings: dict[str, str]  # those that differ between the groups
    runs: list[Run]

    def values(self, of: Callable[[Run], float]) -> dict[str, float]:
        """Return seed → value, the mean of its runs that have one; of finished runs alone, if the seed has any."""
        found: dict[str, list[tuple[bool, float]]] = {}
        for run in self.runs:
            if not math.isnan(value := of(run)):
                found.setdefault(text(run.config.get("seed")), []).append((bool(run.summary), value))
        return {seed: fmean(_best_known(own)) for seed, own in found.items()}


def _count(runs: int, seeds: int) -> str:
    """Return the number of runs, and that of seeds if runs share some, or have no evaluation."""
    return str(runs) if runs == seeds else f"{runs} ({seeds} seed{'s' * (seeds != 1)})"


def _best_known(values: Sequence[tuple[bool, float]]) -> list[float]:
    """Return the values of finished runs, or all of them if none is finished."""
    return [value for finished, value in values if finished] or [value for _, value in values]


@dataclass(frozen=True)
class Comparison:
    """Groups of runs, the first of which the others are tested against."""

    groups: list[Group]

    @property
    def settings(self) -> list[str]:
        """Return the keys that differ between groups."""
        return list(self.groups[0].settings)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows: a row a group, each value as mean ± half its 95 % interval over seeds."""
        header = ["group", "runs", "evaluation", "vs first", "p", *FINAL.values(), "seconds"]
        rows = []
        first = self.groups[0].values(evaluated)
        for group in self.groups:
            own = group.values(evaluated)
            differences = [own[seed] - first[seed] for seed in own if seed in first]
            against = [] if group is self.groups[0] else differences
            finals = [group.values(lambda run, key=key: final(run, key)) for key in FINAL]  # type: ignore[misc]
            rows.append(
                [
                    group.label,
                    _count(len(group.runs), len(own)),
                    spread(own.values()),
                    spread(against, signed=True),
                    "–" if math.isnan(p := paired(against)) else f"{p:.2g}",
                    *(spread(values.values()) for values in finals),
                    spread(group.values(lambda run: number(mapping(run.summary, "seconds").get("total"))).values()),
                ]
            )
        return header, rows

    def runs(self) -> list[list[str]]:
        """Return a row for each run: folder, group, seed, its last evaluation, RL steps, and whether it is finished."""
        return [
            [
                str(run.folder),
                group.label,
                text(run.config.get("seed")),
                shown(evaluated(run)),
                str(run.rl[-1]["step"]) if run.rl else "–",
                "finished" if run.summary else "not finished",
            ]
            for group in self.groups
            for run in group.runs
        ]

    def shown(self) -> dict[str, Any]:
        """Return what compared.html.jinja shows."""
        header, rows = self.table()
        return {
            "header": header,
            "rows": rows,
            "settings": self.settings,
            "groups": self.groups,
            "drawn": self.groups[:COLOURS],
            "more": len(self.groups[COLOURS:]),
            "charts": self.charts(),
            "runs": self.runs(),
            "last": LAST,
        }

    def charts(self) -> list[Chart]:
        """Return the curves of the groups: means over seeds, with the range of the seeds shaded."""
        found = [_chart(self.groups, *CURVES[key], lambda run, key=key: _points(run.rl, key)) for key in CURVES]  # type: ignore[misc]
        found.insert(
            1, _chart(self.groups, "Evaluation", "mean reward", PLAIN, lambda run: _points(_evals(run), "reward"))
        )
        return [chart for chart in found if chart]


def find_runs(folders: Sequence[Path]) -> list[Run]:
    """Return the runs in the folders: each is one itself, or holds some, as a sweep's or a recipe's folder does.

    Raises NotADirectoryError for a folder without a run.
    """
    runs: dict[Path, Run] = {}
    for folder in folders:
        inside = sorted((file.parent for file in folder.glob("*/config.yaml")), key=_natural)
        found = [folder] if (folder / "config.yaml").is_file() else inside
        if not found:
            raise NotADirectoryError(f"{folder} is no run's folder, and no folder of runs (there is no config.yaml)")
        runs |= {run.resolve(): read_run(run) for run in found}
    return list(runs.values())


def compare(runs: Sequence[Run], apart: bool = False) -> Comparison:
    """Return the comparison of at least one run; groups are in the order of their first runs.

    `apart` puts each run into a group of its own, whatever its settings.
    """
    settings = [_settings(run) | ({"folder": str(run.folder.resolve())} if apart else {}) for run in runs]
    keys = sorted(set().union(*settings))
    differ = [key for key in keys if len({own.get(key) for own in settings}) > 1]
    groups: dict[tuple[str | None, ...], list[Run]] = {}
    for run, own in zip(runs, settings, strict=True):
        groups.setdefault(tuple(own.get(key) for key in differ), []).append(run)
    return Comparison([_group(differ, values, members) for values, members in groups.items()])


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Write the comparison as one self-contained HTML file, atomically."""
    from hybrid_rl.run_folder.files import atomic_file

    groups = comparison.groups
    page = templates().get_template("comparison.html.jinja")
    html = page.render(
        names=sorted({text(run.config.get("name")) for group in groups for run in group.runs}),
        groups=len(groups),
        runs=sum(len(group.runs) for group in groups),
        compared=comparison.shown(),
    )
    with atomic_file(path) as file:
        file.write(visible(html).encode())


def evaluated(run: Run) -> float:
    """Return the reward of the run's last evaluation, after RL if it got there; NaN if there is none."""
    for name in ("rl", "model"):
        if not math.isnan(value := number(run.evaluation(name).get("reward"))):
            return value
    measured = [number(e.get("reward")) for e in _evals(run)]
    return measured[-1] if measured else math.nan


def final(run: Run, key: str) -> float:
    """Return the mean of a metric over the last RL steps; NaN if there is none."""
    values = [value for _, value in _points(run.rl, key)][-LAST:]
    return sum(values) / len(values) if values else math.nan


def spread(values: Any, signed: bool = False) -> str:
    """Return "mean ± half the interval" as a text."""
    mean, half = interval(list(values))
    sign = "+" if signed and mean > 0 else ""
    return sign + shown(mean) + ("" if math.isnan(half) else f" ± {half:,.0f}" if half >= 100 else f" ± {half:.2g}")


def _settings(run: Run) -> dict[str, str]:
    flat = _flat(run.config)
    return {key: value for key, value in flat.items() if not (f"{key}.").startswith(tuple(f"{i}." for i in IGNORED))}


def _flat(node: object, prefix: str = "") -> dict[str, str]:
    if not isinstance(node, Mapping):
        return {prefix[:-1]: node if isinstance(node, str) else json.dumps(node)}
    return {key: value for name, child in node.items() for key, value in _flat(child, f"{prefix}{name}.").items()}


def _group(keys: Sequence[str], values: Sequence[str | None], runs: Sequence[Run]) -> Group:
    settings = {key: "–" if value is None else value for key, value in zip(keys, values, strict=True)}
    short = [f"{_short(key, keys)}={value}" for key, value in settings.items()]
    ordered = sorted(runs, key=lambda run: number(run.config.get("seed")))
    return Group(", ".join(short) or text(runs[0].config.get("name")) or "runs", settings, ordered)


def _short(key: str, keys: Sequence[str]) -> str:
    """Return the shortest end of a key, in whole parts, that no other key has."""
    parts = key.split(".")
    ends = (".".join(parts[i:]) for i in range(len(parts) - 1, -1, -1))
    return next((end for end in ends if sum(f".{other}".endswith(f".{end}") for other in keys) == 1), key)


def _natural(path: Path) -> tuple[int, str]:
    return (int(path.name) if path.name.isdecimal() else 0, path.name)


def _evals(run: Run) -> list[Record]:
    return [e for e in run.evals if e["name"] in ("base", "sft", "step", "rl", "model")]


def _points(records: Sequence[Record], key: str) -> list[tuple[int, float]]:
    found = {r["step"]: number(r.get(key)) for r in records}  # of several at a step the last
    return [(step, value) for step, value in found.items() if not math.isnan(value)]


def _chart(
    groups: Sequence[Group], title: str, unit: str, scale: Scale, of: Callable[[Run], list[tuple[int, float]]]
) -> Chart | None:
    """Return one chart with a curve a group, at each step the mean over the runs that have it; None without values."""
    found = []
    for group in groups[:COLOURS]:
        at: dict[int, list[float]] = {}
        for run in group.runs:
            for step, value in of(run):
                at.setdefault(step, []).append(value)
        found.append({step: at[step] for step in sorted(at)})
    everything = [value for at in found for values in at.values() for value in values]
    if not everything:
        return None
    down = vertical(everything, scale.from_zero or scale.percent, default=0.1 if scale.percent else 1.0)
    across = horizontal([step for at in found for step in at])
    bands, lines, legend = [], [], []
    for colour, (group, at) in enumerate(zip(groups, found, strict=False), 1):
        x, several = list(at), any(len(values) > 1 for values in at.values())
        mean = [sum(values) / len(values) for values in at.values()]
        if several:
            bands += filled(across, down, x, [(min(values), max(values)) for values in at.values()], colour)
        lines += curve(across, down, x, mean, colour)
        newest = shown(mean[-1], scale.percent) if mean else "–"
        legend.append(Legend(f"{group.label} {newest}", colour))
    return chart((title, unit), (across, down), [*bands, *lines], legend, scale=scale)
