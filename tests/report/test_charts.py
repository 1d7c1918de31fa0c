"""The charts show the numbers of metrics.jsonl, gaps where nothing was measured, and no line where there is no curve."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybrid_rl.report import write_report
from tests.report.runs import evaluation, rl, write_metrics


def drawn(html: str, title: str) -> dict[str, list[list[tuple[float, float]]]]:
    """The paths of a chart by their kind and colour, each a list of (step, value), read back through the axes' labels."""
    figure = re.search(f"<figure>\n<figcaption><b>{title}</b>.*?</figure>", html, flags=re.DOTALL)
    assert figure, title
    ticks = [
        [(float(place), float(label.replace(",", "").replace(" %", "e-2").replace("\N{MINUS SIGN}", "-"))) for place, label in re.findall(pattern, figure[0])]
        for pattern in (r'<text x="([\d.]+)" y="164"[^>]*>([^<]*)', r'<text x="43" y="([\d.]+)"[^>]*>([^<]*)')
    ]  # fmt: skip

    def value(axis: int, place: float) -> float:
        (p, v), (q, w) = ticks[axis][0], ticks[axis][-1]
        return v + (place - p) * (w - v) / (q - p)

    found: dict[str, list[list[tuple[float, float]]]] = {}
    for kind, colour, path in re.findall(r'<path class="([^"]*)" style="color: var\(--c(\d)\)" d="([^"]*)"', figure[0]):
        runs = [re.findall(r"(-?[\d.]+) (-?[\d.]+)", part) for part in path.split("M")[1:]]
        found[f"{kind} {colour}"] = [[(value(0, float(x)), value(1, float(y))) for x, y in run] for run in runs]
    return found


def near(points: list[tuple[float, float]], expected: list[tuple[float, float]], scale: float = 1.0) -> None:
    """Equal to within a tenth of an SVG's unit."""
    assert [x for x, _ in points] == pytest.approx([x for x, _ in expected], abs=0.1)
    assert [y for _, y in points] == pytest.approx([y for _, y in expected], abs=0.002 * scale)


def test_the_numbers_of_the_charts_are_those_of_the_metrics(tmp_path: Path) -> None:
    steps = range(1, 13)
    records = [
        rl(
            s,
            reward=0.05 * s,
            length=20.0 + s,
            truncated=0.03 * s,
            lr=1e-3 / s,
            silent_groups=s % 5,
            seconds={"rollout": 0.1 * s, "update": 0.2},
        )
        for s in steps
    ]
    write_metrics(tmp_path, records)
    html = write_report(tmp_path).read_text("utf-8")
    for title, key, scale in (
        ("Reward", "reward", 1), ("Completion length", "length", 40), ("Truncated", "truncated", 1), ("Learning rate", "lr", 1e-3),
        ("Groups without a signal", "silent_groups", 5),
    ):  # fmt: skip
        expected = [(s, float(records[s - 1][key])) for s in steps]  # type: ignore[arg-type]
        near(drawn(html, title)["line 1"][0], expected, scale)
        near([p for run in drawn(html, title)["dots 1"] for p in run], expected, scale)
    bars = re.search(r'<path class="bars" style="color: var\(--c1\)" d="([^"]*)"', html)
    assert bars
    tops = [float(y) for y in re.findall(r"V([\d.]+)h", bars[1])]
    heights = [150 - y for y in tops]
    assert [h / heights[0] for h in heights] == pytest.approx(list(steps), rel=0.02)


def test_a_gap_breaks_the_line_and_a_point_alone_is_seen(tmp_path: Path) -> None:
    write_metrics(tmp_path, [rl(s, entropy=None if s in (3, 5, 6) else 1.0 / s) for s in range(1, 9)])
    html = write_report(tmp_path).read_text("utf-8")
    found = drawn(html, "Entropy")
    assert [[round(x) for x, _ in run] for run in found["line 1"]] == [[1, 2], [7, 8]]
    assert [round(x) for run in found["dots 1"] for x, _ in run] == [1, 2, 4, 7, 8]
    write_metrics(tmp_path, [rl(s, entropy=None if s in (3, 50) else 1.0 / s) for s in range(1, 60) if s != 51])
    assert "line 1" in drawn(write_report(tmp_path).read_text("utf-8"), "Entropy")


def test_two_points_are_no_curve(tmp_path: Path) -> None:
    write_metrics(tmp_path, [rl(1), rl(2), evaluation("base", 0, correct=0.1), evaluation("rl", 2, correct=0.4)])
    html = write_report(tmp_path).read_text("utf-8")
    assert 'class="line"' not in html
    near([p for run in drawn(html, "Evaluation: correct")["dots 1"] for p in run], [(0, 0.1), (2, 0.4)])
    write_metrics(tmp_path, [rl(1), rl(2), rl(3)])
    assert 'class="line"' in write_report(tmp_path).read_text("utf-8")


def test_the_band_of_the_reward_ends_at_the_rewards_of_its_step(tmp_path: Path) -> None:
    ranges = [(0.0, 1.0), (0.25, 1.0), (0.0, 0.75)]
    write_metrics(
        tmp_path,
        [rl(s, reward=0.5, reward_std=2.0, reward_min=low, reward_max=high) for s, (low, high) in enumerate(ranges, 1)],
    )
    (band,) = drawn(write_report(tmp_path).read_text("utf-8"), "Reward")["band 1"]
    near(band, [(1, 0.0), (2, 0.25), (3, 0.0), (3, 0.75), (2, 1.0), (1, 1.0)])
    write_metrics(tmp_path, [rl(s, reward=0.5, reward_std=0.25) for s in (1, 2, 3)])  # metrics of old have no range
    (band,) = drawn(write_report(tmp_path).read_text("utf-8"), "Reward")["band 1"]
    near(band, [(1, 0.25), (2, 0.25), (3, 0.25), (3, 0.75), (2, 0.75), (1, 0.75)])


def test_one_part_of_the_reward_is_the_reward(tmp_path: Path) -> None:
    write_metrics(tmp_path, [rl(1)])
    assert "Parts of the reward" not in write_report(tmp_path).read_text("utf-8")
    write_metrics(tmp_path, [rl(1, parts={"format": 1.0, "truth": 0.5})])
    assert "Parts of the reward" in write_report(tmp_path).read_text("utf-8")


def test_a_long_run_keeps_its_extremes_and_a_page_of_some_size(tmp_path: Path) -> None:
    write_metrics(tmp_path, [rl(s, grad_norm=1.0 + (s % 7) / 7 + 50.0 * (s == 7777)) for s in range(1, 10_001)])
    html = write_report(tmp_path).read_text("utf-8")
    assert len(html) < 600_000
    (line,) = drawn(html, "Gradient norm")["line 1"]
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    near([max(line, key=lambda p: p[1])], [(7777, 51.0 + 0.0)], 500)
    assert (line[0][0], line[-1][0]) == (pytest.approx(1, abs=5), pytest.approx(10_000, abs=5))
