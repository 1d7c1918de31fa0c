"""Sweeps with launchers and sweepers of Hydra's plugins. Basic launcher, joblib and signals: tests/test_run.py."""

from __future__ import annotations

import pytest

from hybrid_rl import sweep
from hybrid_rl.config import ConfigError
from tests.test_run import run

EVALUATES = ["sft.steps=0", "rl.steps=0", "eval.max_tasks=2", "rollout.max_tokens=8", "-m"]


def test_the_jobs_of_a_sweep():
    assert sweep.jobs(["a=1", "b=2,3"]) == [["a=1", "b=2"], ["a=1", "b=3"]]
    searched = [
        "hydra/sweeper=optuna",
        "a=interval(0.5, 2)",
        "b=choice(4,5)",
        "c=tag(log, interval(1e-5, 1e-3))",
        "d=x",
    ]
    assert sweep.jobs(searched) == [["hydra/sweeper=optuna", "a=0.5", "b=4", "c=1e-05", "d=x"]]
    with pytest.raises(ConfigError, match=r"INTERVAL_SWEEP; intervals are for hydra/sweeper=optuna$"):
        sweep.jobs(["a=interval(0, 1)"])


def test_a_failed_job_is_named_and_the_rest_go_on(tmp_path):
    output = run(tmp_path, *EVALUATES, "data.eval_tasks=0,2", code=1)
    (failed,) = [line for line in output.splitlines() if line.startswith("sweep job 0 failed with exit code 1: ")]
    assert failed.endswith("data.eval_tasks=0")
    assert "sweep:   1 of 2 jobs reached their end, not 0\n" in output


def test_a_missing_plugin_is_named(tmp_path):
    output = run(tmp_path, *EVALUATES, "hydra/launcher=ray_aws", "seed=0,1", code=2)
    assert "there is no such launcher; install its plugin, perhaps hydra-ray-launcher" in output


@pytest.mark.slow
def test_submitit_s_local_executor(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    output = run(tmp_path, *EVALUATES, "hydra/launcher=submitit_local", "data.eval_tasks=0,2", code=1)
    assert "sweep:   1 of 2 jobs reached their end, not 0\n" in output
    (folder,) = (tmp_path / "outputs" / "reverse").iterdir()
    said = "".join(file.read_text() for file in folder.glob(".submitit/*/*.out"))
    assert said.count("sweep job 0 failed with exit code 1") == said.count("evaluation reward: model") == 1


@pytest.mark.slow
def test_optuna_gets_the_reward_and_names_the_best(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    search = [
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=3",
        "hydra.sweeper.n_jobs=1",
        "hydra.sweeper.sampler.seed=3",
    ]
    output = run(
        tmp_path, *EVALUATES, *search, "eval.temperature=interval(0.5,1.5)", "data.eval_tasks=choice(0,2)", code=1
    )
    failed = output.count("failed with exit code 1")
    assert 0 < failed < 3, "the seed draws both"
    assert output.count("evaluation reward: model") == 3 - failed
    assert f"sweep:   {3 - failed} of 3 jobs reached their end" in output
    assert "best:    {" in output
