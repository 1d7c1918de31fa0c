"""Whole runs in this process: how one ends that had nothing to train on, and what the plan says of one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hybrid_rl import stages
from hybrid_rl.plan import print_plan
from hybrid_rl.preflight.settings import load
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.report.console import Console
from tests.bad_inputs.conftest import SMALL

pytestmark = pytest.mark.slow

SILENT = "reward._target_=tests.rewards.constant"


def configured(*overrides: str):
    return OmegaConf.to_object(load([*SMALL, *overrides]))


def said(capsys: pytest.CaptureFixture) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_a_run_that_trained_nothing_ends_with_an_error_after_its_report(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert stages.run(configured(SILENT, "rl.steps=2", "rl.max_empty_steps=3"), tmp_path / "run") == 1
    lines = said(capsys)
    assert sum("! nothing was trained: every group was dropped" in line for line in lines) == 2
    assert lines[-1].startswith("hybrid_rl: the run trained nothing: none of its RL steps had a gradient; see why in ")
    assert "<b>Nothing was trained</b>" in (tmp_path / "run" / "report.html").read_text()
    assert (tmp_path / "run" / "final").is_dir()
    assert stages.run(configured(SILENT, "rl.steps=2", "rl.max_empty_steps=0"), tmp_path / "allowed") == 0


def test_empty_steps_in_a_row_end_a_run_and_are_counted_on_when_it_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    assert stages.run(configured(SILENT, "rl.steps=9", "rl.max_empty_steps=2"), tmp_path) == 1
    assert re.match(
        r"hybrid_rl: nothing was trained in 2 RL steps in a row \(rl.max_empty_steps=2\), in step 2 because",
        said(capsys)[-1],
    )
    assert "<b>Nothing was trained</b>" in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "summary.json").exists(), "it did not reach its end"
    assert stages.run(configured(SILENT, "rl.steps=9", "rl.max_empty_steps=4", f"resume={tmp_path}"), tmp_path) == 1
    assert "in 4 RL steps in a row (rl.max_empty_steps=4), in step 4 because" in said(capsys)[-1]
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if line["stage"] == "rl"] == [1, 2, 3, 4]


def test_a_resumed_run_whose_earlier_steps_trained_is_sound(tmp_path: Path):
    """And one that only evaluates trains nothing by intent."""
    hashed, bound = "reward._target_=tests.rewards.hash_of_answer", "rl.max_empty_steps=1"
    assert stages.run(configured(hashed, bound), tmp_path / "a") == 0
    assert stages.run(configured(hashed, bound, f"resume={tmp_path / 'a'}"), tmp_path / "a") == 0  # no step is left
    assert stages.run(configured(SILENT, bound, "rl.steps=0"), tmp_path / "b") == 0
    assert "othing was trained" not in (tmp_path / "b" / "report.html").read_text()


@pytest.mark.parametrize("max_tokens", [4, 8, 128])
def test_what_a_plan_calls_typical_is_never_more_than_what_it_calls_at_most(
    tmp_path: Path, capsys: pytest.CaptureFixture, max_tokens: int
):
    config = configured("sft.steps=2", f"rollout.max_tokens={max_tokens}", "reward._target_=tests.rewards.constant")
    print_plan(config, tmp_path, Console(), Ranks())
    lines = {line.split("  ")[0]: line for line in said(capsys)}
    typical, most = (
        [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) (?:tokens|rows)", lines[name])]
        for name in ("typical", "at most")
    )
    assert len(typical) == len(most) == 4
    assert all(t <= m for t, m in zip(typical, most, strict=True))
    assert "about 0.00 GiB for rollouts of rollout.max_tokens=" in lines["disk"]
