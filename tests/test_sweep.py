"""Sweeps with launchers and sweepers of Hydra's plugins. Basic launcher, joblib and signals: tests/test_run.py."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from omegaconf import OmegaConf

from hybrid_rl import sweep
from hybrid_rl.config import Config, ConfigError
from hybrid_rl.preflight.settings import load
from hybrid_rl.processes.launch import attend
from tests.test_run import run

pytestmark = pytest.mark.slow  # each starts several ranks, or whole runs

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


def evaluated(job: Path, **rewards: float) -> None:
    """Write the evaluations of a job, step1=0.5 and so on, among other lines."""
    job.mkdir(parents=True)
    lines = [{"stage": "rl", "step": 1, "reward": 9.0}, {"stage": "eval", "name": "base", "step": 0, "reward": 0.0}]
    lines += [{"stage": "eval", "name": "step", "step": int(k[4:]), "reward": v} for k, v in rewards.items()]
    (job / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"name": "step", "st')


@pytest.mark.parametrize(
    ("own", "pruned"),
    [
        ({"step2": 0.5}, False),  # the median of 0.1, 0.25, 0.75, 0.9 at step 2
        ({"step2": 0.49}, True),
        ({"step2": 0.51, "step4": 0.1}, False),  # its best counts; the median of two jobs at step 4 is too few
        ({"step1": 0.0}, False),  # no other was evaluated there
        ({}, False),
    ],
)
def test_a_job_is_behind_when_its_best_is_below_the_median_of_enough_others(tmp_path, monkeypatch, own, pruned):
    for job, reward in enumerate((0.1, 0.25, 0.75, 0.9)):
        evaluated(tmp_path / str(job), step2=reward, **({"step4": reward} if job > 1 else {}))
    evaluated(tmp_path / "4", **own)
    (tmp_path / "5").mkdir()
    sent = []
    monkeypatch.setattr("os.kill", lambda *signal: sent.append(signal))
    pruner = sweep.Pruner(tmp_path / "4", after=4)
    pruner.check({}, [0])
    pruner.check({0: 123}, [])
    assert sent == [(123, signal.SIGTERM)] * pruned
    assert pruner.behind == (
        "its best evaluation, 0.490 up to step 2, is below the others' median, 0.500" if pruned else ""
    )


def test_a_job_that_is_behind_is_ended_and_what_it_reached_counts(tmp_path, monkeypatch, capfd):
    """Children show their evaluation, then finish (job 0) or wait for the signal (job 1), as a run does that saves itself."""
    for job in ("0", "1"):
        evaluated(tmp_path / f".{job}", step1=0.5 - 0.25 * int(job))
    child = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
job = sys.argv[-1].split("=")[1].strip("'")
os.rename(os.path.join(os.path.dirname(job), "." + os.path.basename(job)), job)
if job.endswith("1"):
    time.sleep(60)
open(os.path.join(job, "summary.json"), "w").write("{}")
"""
    monkeypatch.setattr(sweep, "attend", lambda e, a, patience, pruner: attend(e, ["-c", child, *a], patience, pruner))
    overrides = ["+recipe=reverse", "rl.eval_every=1", "sweep.prune=true", "sweep.prune_after=1", "seed=0,1"]
    config = cast(Config, OmegaConf.to_object(load(overrides[:-1])))
    before = time.monotonic()
    assert sweep.run(overrides, None, [config, config], tmp_path) == 0
    assert time.monotonic() - before < 30
    output = capfd.readouterr().out
    assert (
        "sweep job 1 is pruned: its best evaluation, 0.250 up to step 1, is below the others' median, 0.500; " in output
    )
    assert "sweep:   1 of 2 jobs reached their end; 1 were pruned\n" in output
    assert sweep._objective(tmp_path / "1") == 0.25


def test_submitit_s_local_executor(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    output = run(tmp_path, *EVALUATES, "hydra/launcher=submitit_local", "data.eval_tasks=0,2", code=1)
    assert "sweep:   1 of 2 jobs reached their end, not 0\n" in output
    (folder,) = (tmp_path / "outputs" / "reverse").iterdir()
    said = "".join(file.read_text() for file in folder.glob(".submitit/*/*.out"))
    assert said.count("sweep job 0 failed with exit code 1") == said.count("evaluation reward: model") == 1


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


def test_jobs_after_a_signal_give_a_search_no_value(monkeypatch):
    """Else the search would take an exit code for the best reward of all."""
    for name, result in (("optuna", None), ("basic", 143)):
        job = SimpleNamespace(runtime=SimpleNamespace(choices={sweep.SWEEPER: name}))
        monkeypatch.setattr(sweep.HydraConfig, "get", lambda job=job: job)
        monkeypatch.setattr(sweep, "asked", lambda: 15)
        assert sweep._job(None, OmegaConf.create()) == result
