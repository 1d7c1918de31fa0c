"""The benchmark of growth tells what grows faster than its floor."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import growth
from benchmarks.growth import PARTS, Part, exponent


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_exponents_are_those_of_the_points_above_the_noise(power: float) -> None:
    points = [(n, 3.0 * n**power) for n in (10, 100, 1000)]
    assert exponent([(1, 0.001), *points], 0.01) == pytest.approx(power)
    assert exponent(points[:1], 0.01) is None


def _work(power: float):
    def make(rollouts: int, **_: int):
        return lambda: bytearray(int(2**17 * (rollouts / 128) ** power))

    return make


@pytest.mark.slow
def test_what_grows_too_fast_fails_and_is_named(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(growth, "SIZES", growth.SIZES | {"rollouts": (128, 256, 512)})
    floors = {"rollouts": (math.inf, 1.0)}
    parts = [Part("linear", _work(1.0), floors), Part("square", _work(2.0), floors)]
    assert growth.main([], parts, tmp_path) == 1
    assert "too fast: square by rollouts" in capsys.readouterr().out
    found = json.loads((tmp_path / "growth.json").read_text())["results"]
    assert [round(r["exponents"][1], 1) for r in found] == [1.0, 2.0]
    assert "square" in (tmp_path / "growth.md").read_text()
    assert (tmp_path / "growth.png").stat().st_size > 0
    assert growth.main(["--only", "linear"], parts, tmp_path) == 0


@pytest.mark.parametrize("name", ["build and check", "pack trees", "parquet", "remove old files"])
def test_a_part_of_the_host_runs(name: str) -> None:
    (part,) = (part for part in PARTS if part.name == name)
    assert part.make(**growth.USUAL, steps=10)() is None
