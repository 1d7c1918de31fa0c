"""Runs to go on from: damaged checkpoints, those of another model or configuration, files that were changed since."""

import json
import shutil

import pytest
from omegaconf import OmegaConf

from hybrid_rl import stages
from hybrid_rl.preflight.settings import load
from tests.bad_inputs.conftest import SMALL

SAME = ["rollout.max_prompt_tokens=200", "data.max_length=12", "reward._target_=tests.bad_inputs.test_saved_runs.length"]


def length(completion, task):
    """A reward that differs between completions of a model that has learnt nothing, so that there is an update."""
    return len(completion) + sum(map(ord, completion)) / 1e6


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of one step, finished."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    assert stages.run(OmegaConf.to_object(load([*SMALL, *SAME])), folder) == 0
    return folder


def cut(name):
    return lambda run: (run / name).write_bytes((run / name).read_bytes()[:-9])


def gone(name):
    return lambda run: (run / name).unlink()


def write(name, text):
    return lambda run: (run / name).write_text(text)


def rewrite(name, **changes):
    def change(run):
        content = {**json.loads((run / name).read_text()), **changes}
        (run / name).write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))

    return change


def incomplete(run):
    for marker in (run / "checkpoints").glob("*/COMPLETE"):
        marker.unlink()


def nothing(run):
    pass


LAST = "checkpoints/rl_000001"
POLICY, OPTIMIZER, STATE, MARKER = (f"{LAST}/{name}" for name in (
    "policy.00000-of-00001.safetensors", "optimizer.00000-of-00001.safetensors", "state.json", "COMPLETE"))  # fmt: skip
AGAIN = f"is missing or damaged; delete {{run}}/{LAST} to resume from the one before"

# name: what is done to the run, with which other settings it is resumed → the whole line; {run} is its folder
RUNS = {
    "weights cut off": (cut(POLICY), [], f"{{run}}/{POLICY} {AGAIN}"),
    "weights gone": (gone(POLICY), [], f"{{run}}/{POLICY} {AGAIN}"),
    "moments cut off": (cut(OPTIMIZER), [], f"{{run}}/{OPTIMIZER} {AGAIN}"),
    "a file too many": (write(f"{LAST}/policy.00001-of-00002.safetensors", ""), [], f"{{run}}/{LAST}/policy.00001-of-00002.safetensors is not of this checkpoint; delete it"),
    "broken state": (write(STATE, '{"stage": "r'), [], f"{{run}}/{STATE} {AGAIN}"),
    "state a list": (write(STATE, "[]"), [], f"{{run}}/{STATE} {AGAIN}"),
    "state without its step": (rewrite(STATE, step=...), [], f"{{run}}/{STATE} {AGAIN}"),
    "broken marker": (write(MARKER, "{"), [], f"{{run}}/{MARKER} {AGAIN}"),
    "no complete one": (incomplete, [], "resume={run}: there is no complete checkpoint in {run}/checkpoints (rl_000000, rl_000001: without COMPLETE); resume=never for a new run"),
    "another model": (nothing, ["model.tiny.layers=3"], "{run} was started with other settings (model.tiny.layers: 2 → 3); use those, or resume=never for a new run"),
    "another setting": (nothing, ["rl.optimizer.lr=0.5"], "{run} was started with other settings (rl.optimizer.lr: 0.0004 → 0.5); use those, or resume=never for a new run"),
    "another seed": (nothing, ["seed=7"], "{run} was started with other settings (seed: 0 → 7); use those, or resume=never for a new run"),
    "no configuration": (gone("config.yaml"), [], "{run}/config.yaml is missing or damaged; resume=never for a new run"),
    "broken configuration": (write("config.yaml", "a: [1"), [], "{run}/config.yaml is missing or damaged; resume=never for a new run"),
    "metrics cut": (write("metrics.jsonl", ""), [], "{run}/metrics.jsonl has 0 lines, rl_000001 was saved after 2; resume=never for a new run"),
    "base model gone": (lambda run: shutil.rmtree(run / "base_model"), [], "model.path={run}/base_model cannot be loaded: it is not a Hugging Face model folder on this disk (one with a config.json)"),
    "base model exchanged": (rewrite("base_model/config.json", num_hidden_layers=1, layer_types=["full_attention"]), [], "model.path={run}/base_model has weights that config.json has no place for: "),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_bad_saved_run(name, saved, tmp_path, last_line):
    change, settings, expected = RUNS[name]
    run = shutil.copytree(saved, tmp_path / "run")
    change(run)
    line = last_line(f"resume={run}", *SAME, "rl.steps=2", *settings, folder=str(run))
    if expected.endswith(" "):
        assert line.startswith(expected.format(run=run))
    else:
        assert line == expected.format(run=run)


def test_fewer_steps_than_were_trained(saved, tmp_path, last_line):
    run = shutil.copytree(saved, tmp_path / "run")
    line = last_line(f"resume={run}", *SAME, "rl.steps=0", folder=str(run))
    assert line == f"{run}/{LAST} is past rl.steps=0; raise rl.steps, or resume=never for a new run"
