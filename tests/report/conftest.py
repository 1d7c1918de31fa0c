"""A finished run, for the tests of its report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hybrid_rl.report import write_report
from tests.report.runs import HOSTILE, groups, rl, store, write_metrics


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, with its report."""
    folder = tmp_path_factory.mktemp("reverse") / "2026-03-04_10-20-30"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("name: reverse\nseed: 7\nmodel:\n  path: null\nrl:\n  steps: 40\n")
    evals = {"eval/base": 0.0125, "eval/sft": 0.34, "eval/rl": 0.89}
    versions, model = {"torch": "2.13.0"}, {"path": None, "parameters": 812544}
    (folder / "summary.json").write_text(
        json.dumps(
            {
                "name": "reverse",
                "seed": 7,
                **evals,
                "seconds": {"sft": 41.2, "rl": 70.8, "total": 120.0},
                "versions": versions,
                "model": model,
            }
        )
    )
    measured = [
        {
            "stage": "eval",
            "name": name.removeprefix("eval/"),
            "step": 0,
            "reward": reward,
            "reward_std": 0.16,
            "tasks": 64,
        }
        for name, reward in evals.items()
    ]
    sft = [{"stage": "sft", "step": step, "loss": 3.0 / step, "lr": 0.002, "grad_norm": 0.9} for step in range(1, 20)]
    write_metrics(folder, [*measured, *sft, *(rl(step) for step in range(1, 41))])
    for name in ("base", "sft", "rl"):
        store(folder / "rollouts" / f"eval_{name}.parquet", groups([0.0] * len(HOSTILE), HOSTILE))
    store(folder / "rollouts" / "step_0040.parquet", groups([0.5, 0.9, 0.1, 0.7, 0.3], HOSTILE))
    assert write_report(folder) == folder / "report.html"
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it to change."""
    return Path(shutil.copytree(finished, tmp_path / finished.name))
