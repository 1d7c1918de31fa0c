"""Training from Python: cheap to import, callable again, and its results as tables."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hybrid_rl
from hybrid_rl.config import ConfigError
from tests.test_run import SMALL

EVALUATES = [*SMALL[1:], "sft.steps=0", "eval.max_tasks=2"]


def test_importing_is_cheap():
    heavy = "{'torch', 'hydra', 'omegaconf', 'pandas', 'numpy', 'transformers', 'hybrid_rl.run'}"
    program = f"import hybrid_rl, sys; print(sorted({heavy} & set(sys.modules)), sorted(hybrid_rl.__all__))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[] ['Run', 'RunError', 'train']\n"


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="has no attribute 'trein'"):
        _ = hybrid_rl.trein


@pytest.mark.slow
def test_runs_in_one_process(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    one = hybrid_rl.train("reverse", [*EVALUATES, "rl.steps=1"])
    two = hybrid_rl.train("reverse", [*EVALUATES, "rl.steps=2", "seed=1", "hydra.run.dir=mine"])
    again = hybrid_rl.train(overrides=[f"resume={one.folder}", "rl.steps=2"])
    assert again.folder == one.folder
    assert two.folder == tmp_path / "mine"
    assert [run.config["seed"] for run in (one, two)] == [0, 1]
    assert [r["step"] for r in one.records()] == [r["step"] for r in two.records()] == [1, 2]
    assert two.summary["eval/rl"] == two.records("eval")[-1]["reward"]
    pandas = pytest.importorskip("pandas")
    table = two.metrics()
    assert list(table["step"]) == [1, 2]
    assert table["reward"].tolist() == [r["reward"] for r in two.records()]
    assert table["seconds/update"].tolist() == [r["seconds"]["update"] for r in two.records()]
    rollouts = two.rollouts(2)
    assert rollouts["reward"].mean() == pytest.approx(table["reward"][1])
    assert rollouts.equals(pandas.read_parquet(tmp_path / "mine" / "rollouts" / "step_0002.parquet"))
    assert "step 2/2" in capsys.readouterr().out


def test_what_does_not_reach_its_end_raises(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"did you mean rl\.steps\?$"):
        hybrid_rl.train("reverse", ["rl.stepz=3"])
    with pytest.raises(hybrid_rl.RunError, match="ended with exit code 1") as error:
        hybrid_rl.train("reverse", [*EVALUATES, "data.eval_tasks=0"])
    assert error.value.code == 1
    with pytest.raises(NotADirectoryError, match="is not the folder of a run"):
        hybrid_rl.Run(tmp_path / "nothing")


def test_without_pandas_there_are_records(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    run = hybrid_rl.Run(tmp_path)
    assert run.records() == []
    with pytest.raises(ImportError, match="pip install pandas"):
        run.metrics()
