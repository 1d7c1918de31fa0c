"""The worked example comes true, from a checkout and from an installed wheel."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


def finished(folder: Path, *overrides: str) -> Path:
    """A run's folder after the command that a user would type."""
    subprocess.run(
        [sys.executable, "-m", "hybrid_rl.run", *overrides, f"hydra.run.dir={folder}"],
        cwd=folder.parent,
        check=True,
        timeout=1200,
    )
    return folder


@pytest.fixture(scope="module")
def reversing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's run, on a seed that no setting was chosen on."""
    return finished(tmp_path_factory.mktemp("reverse") / "run", "+recipe=reverse", "seed=7")


def test_the_recipe_learns_to_reverse(reversing: Path):
    summary = reversing / "summary.json"
    result = json.loads(summary.read_text())
    assert result["eval/base"] <= 0.1
    assert 0.3 <= result["eval/sft"] <= 0.7
    assert result["eval/rl"] >= 0.8
    steps = [
        json.loads(line)
        for line in (summary.parent / "metrics.jsonl").read_text().splitlines()
        if '"stage": "rl"' in line
    ]
    assert len(steps) == 20
    assert all(step["rollouts"] == 128 for step in steps if not step["missing_groups"])
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.2
    assert all(step["mismatch_kl"] < 1e-6 for step in steps)


def test_distilling_that_run_into_a_smaller_model_raises_it_above_its_sft(reversing: Path, tmp_path: Path):
    """On the reward of longer sentences than the demonstrations'."""
    both = ("+recipe=reverse_opd", f"algo.teacher={reversing / 'final'}", "seed=1", "eval.samples=4")
    distilled = json.loads((finished(tmp_path / "distilled", *both) / "summary.json").read_text())
    assert distilled["eval/rl"] > distilled["eval/sft"] + 0.05


def test_an_installed_wheel_runs_in_an_empty_folder(tmp_path):
    """Built from the sources and put on the path instead of the checkout: conf and recipes travel inside."""
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path / "wheel"), str(ROOT)], check=True, timeout=300
    )
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)], check=True, timeout=300
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    small = [
        "sft.steps=4",
        "rl.steps=2",
        "rl.max_empty_steps=0",
        "eval.max_tasks=4",
        "rollout.batch_size=16",
        "rollout.group_size=4",
        "rollout.max_tokens=16",
    ]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    subprocess.run(
        [sys.executable, "-m", "hybrid_rl.run", "+recipe=reverse", *small],
        cwd=empty,
        env=environment,
        check=True,
        timeout=300,
    )
    where = subprocess.run(
        [sys.executable, "-c", "import hybrid_rl, hybrid_rl.recipes.reverse as r; print(hybrid_rl.__file__, r.__file__)"],
        cwd=empty, env=environment, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert where.count(str(tmp_path / "site")) == 2
    assert len(list(empty.glob("outputs/reverse/*/report.html"))) == 1
