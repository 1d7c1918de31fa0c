"""Trackers beside metrics.jsonl: what the real libraries get, and that one that fails never ends a run."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybrid_rl.config import Config, ConfigError, TrackerConfig, TrackerKind
from hybrid_rl.preflight.settings import load
from hybrid_rl.run_folder import trackers
from hybrid_rl.run_folder.metrics import Metrics
from hybrid_rl.run_folder.trackers import numbers, open_tracker

FACTS = {"git": {"commit": "0123", "dirty": True}, "versions": {"torch": "9.9"}}
STEP = {"step": 3, "reward": 0.5, "parts": {"exact": 0.25}, "memory": {"update": [1.0, 2.0]}, "grad_norm": None}


def config(folder: Path, kind: str, **settings) -> Config:
    tracker = TrackerConfig(TrackerKind(kind), tags=["one", "two"], offline=True, **settings)
    return Config(name="reverse", seed=7, output_dir=str(folder), tracker=tracker)


def track(given: Config, folder: Path, lines: list[dict], resumed: bool = False, finished: bool = True) -> list[str]:
    """Write the lines as a run does; returns what the console was told."""
    folder.mkdir(exist_ok=True)
    said: list[str] = []
    metrics = Metrics(folder / "metrics.jsonl", 1 if resumed else 0)
    metrics.tracker = open_tracker(given, folder, FACTS, resumed, said.append)
    for line in lines:
        metrics.write("rl", **line)
    metrics.close(finished)
    return said


def test_numbers_of_a_line():
    assert numbers("rl", STEP) == {"rl/step": 3, "rl/reward": 0.5, "rl/parts/exact": 0.25}
    assert numbers("eval", {"name": "base", "step": 0, "pass@1": 1.0}) == {"eval_base/step": 0, "eval_base/pass_1": 1.0}
    assert numbers("eval", {"name": "rl", "step": 9, "reward": float("nan")}) == {"eval/step": 9}


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_gets_every_line_and_a_resumed_run_none_twice(tmp_path):
    pytest.importorskip("tensorboard")
    given = config(tmp_path, "tensorboard")
    assert track(given, tmp_path, [STEP, {**STEP, "step": 4}]) == []
    # a run that was saved after the first line: the second one is written again, and is there already
    assert track(given, tmp_path, [{**STEP, "step": 4}, {**STEP, "step": 5}], resumed=True) == []
    found = scalars(tmp_path / "tensorboard")
    assert found["rl/reward"] == [(3, 0.5), (4, 0.5), (5, 0.5)]
    assert found["rl/parts/exact"] == [(3, 0.25), (4, 0.25), (5, 0.25)]
    (stored,) = (tmp_path / "tensorboard").glob("*/hparams.yml")
    for line in (
        "seed: 7",
        "rl.optimizer.lr: 3.0e-06",
        "git.commit: '0123'",
        "git.dirty: true",
        "versions.torch: '9.9'",
    ):
        assert line in stored.read_text().splitlines()


def test_more_steps_of_a_finished_run_are_all_sent(tmp_path):
    """The evaluation after the last step gives way to further steps: lines of metrics.jsonl do not say what was sent."""
    pytest.importorskip("tensorboard")
    given, said = config(tmp_path, "tensorboard"), []
    for resumed, steps in ((False, [3]), (True, [4, 5])):
        metrics = Metrics(tmp_path / "metrics.jsonl", 1 if resumed else 0)
        metrics.tracker = open_tracker(given, tmp_path, FACTS, resumed, said.append)
        for step in steps:
            metrics.write("rl", **{**STEP, "step": step})
        metrics.write("eval", name="rl", step=steps[-1], reward=0.1 * steps[-1])
        metrics.close(finished=True)
    found = scalars(tmp_path / "tensorboard")
    assert said == []
    assert [step for step, _ in found["rl/reward"]] == [3, 4, 5]
    assert [step for step, _ in found["eval/reward"]] == [3, 5]


@pytest.mark.slow
def test_mlflow_goes_on_in_the_same_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # offline: not even tried
    given = config(tmp_path, "mlflow", project="two runs")
    assert track(given, tmp_path / "a", [STEP], finished=False) == []
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run = json.loads((tmp_path / "a" / "tracker.json").read_text())["id"]
    assert client.get_run(run).info.status == "KILLED"
    assert track(given, tmp_path / "a", [{**STEP, "step": 4, "reward": 0.75}], resumed=True) == []
    found = client.get_run(run)
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "reverse/a"
    assert found.data.tags["tags"] == "one, two"
    assert {
        "seed": "7",
        "git.commit": "0123",
        "git.dirty": "True",
        "versions.torch": "9.9",
    }.items() <= found.data.params.items()
    assert [(m.step, m.value) for m in client.get_metric_history(run, "rl/reward")] == [(3, 0.5), (4, 0.75)]
    experiment = client.get_experiment_by_name("two runs")
    assert len(client.search_runs([experiment.experiment_id])) == 1


@pytest.mark.slow
def test_wandb_offline_goes_on_under_the_same_id(tmp_path):
    pytest.importorskip("wandb")
    given = config(tmp_path, "wandb")
    assert track(given, tmp_path, [STEP]) == []
    assert track(given, tmp_path, [{**STEP, "step": 4}], resumed=True) == []
    name = json.loads((tmp_path / "tracker.json").read_text())["id"]
    files = list((tmp_path / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    assert len(files) in (1, 2)  # two begun within one second share a folder
    content = b"".join(file.read_bytes() for file in files)
    for text in (b"rl/parts/exact", b"git.commit", b"reverse/", b"one"):
        assert text in content


@pytest.mark.slow
def test_trackio_goes_on_under_the_same_name(tmp_path, monkeypatch):
    """It reads where its files lie when it is imported, so this runs in a process of its own."""
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed")
    program = f"""
from pathlib import Path
from tests.run_folder.test_trackers import STEP, config, track
folder = Path({str(tmp_path)!r})
assert track(config(folder, "trackio"), folder, [STEP]) == []
assert track(config(folder, "trackio"), folder, [{{**STEP, "step": 4}}], resumed=True) == []
"""
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "there"), "HF_HUB_OFFLINE": "1"}
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], cwd=root, env=environment, check=True, timeout=120)
    with sqlite3.connect(tmp_path / "there" / "hybrid_rl.db") as base:
        rows = base.execute("select run_name, step, metrics from metrics order by step").fetchall()
        ((stored,),) = base.execute("select config from configs").fetchall()
    assert [(name, step) for name, step, _ in rows] == [
        (f"reverse/{tmp_path.name}", 1),
        (f"reverse/{tmp_path.name}", 2),
    ]
    assert [json.loads(metrics)["rl/step"] for *_, metrics in rows] == [3, 4]
    assert {"seed": 7, "git.commit": "0123"}.items() <= json.loads(stored).items()


class Failing:
    """Stands in for a library: what matters here is only that and when it raises."""

    tracker = None

    def __init__(self, *moments: str):
        self.moments = moments

    def start(self):
        self.fail("start")

    def store_init_configuration(self, values):
        self.fail("store")

    def log(self, values, step):
        self.fail("log")

    def finish(self):
        self.fail("finish")

    def fail(self, moment):
        if moment in self.moments:
            raise ConnectionError(f"no route\nin {moment}")
        if f"{moment} hangs" in self.moments:
            time.sleep(2)


@pytest.mark.parametrize(
    ("moments", "says"),
    [
        (["start"], "tracker=trackio did not begin: no route in start; the run goes on"),
        (["store"], "tracker=trackio did not begin: no route in store; the run goes on"),
        (["log"], "tracker=trackio did not take a step: no route in log; the run goes on"),
        (["finish"], "tracker=trackio is closed: no route in finish; the run goes on"),
        (["log", "finish"], "tracker=trackio did not take a step: no route in log; the run goes on"),
        (["log hangs"], "tracker=trackio is closed: it did not take everything within 0.2 s; the run goes on"),
    ],
)
def test_a_tracker_that_fails_is_reported_once(tmp_path, monkeypatch, moments, says):
    monkeypatch.setattr(trackers, "_make", lambda *_: (Failing(*moments), "name"))
    monkeypatch.setattr(trackers, "CLOSE", 0.2 if "log hangs" in moments else 20)
    (said,) = track(config(tmp_path, "trackio"), tmp_path, [STEP, {**STEP, "step": 4}])
    assert says in said
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_missing_package_is_one_line_that_names_the_extra(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"^tracker.kind=wandb .command line.: wandb is not installed; pip install -e '.\[trackers\]'$",
    ):
        load(["+recipe=reverse", "tracker=wandb"])


def test_a_launcher_s_variables_make_no_process_group(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    import torch

    launcher = {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "9",
    }
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    threads = torch.get_num_threads()
    assert track(config(tmp_path, "tensorboard"), tmp_path, [STEP]) == []
    assert not torch.distributed.is_initialized()
    assert torch.get_num_threads() == threads
    assert launcher.items() <= os.environ.items()
