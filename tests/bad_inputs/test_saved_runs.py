"""Runs to go on from: damaged checkpoints, those of another model or configuration, files that were changed since."""

import json
import re
import shutil

import pytest
from omegaconf import OmegaConf

from hybrid_rl import stages
from hybrid_rl.config import ConfigError
from hybrid_rl.preflight.settings import load
from hybrid_rl.run_folder import checkpoint
from tests.bad_inputs.conftest import SMALL, NoScorer

pytestmark = pytest.mark.slow

SAME = [
    "rollout.max_prompt_tokens=200",
    "data.max_length=12",
    "reward._target_=tests.bad_inputs.test_saved_runs.length",
]


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


def signed(name, text=None, **changes):
    """A file of the last checkpoint with other contents, and the marker says so too: as somebody would write it, not a broken disk."""

    def change(run):
        file = run / LAST / name
        content = json.loads(file.read_text())
        content.update({key: value for key, value in changes.items() if value is not ...})
        file.write_text(
            text or json.dumps({key: value for key, value in content.items() if changes.get(key) is not ...})
        )
        marker = json.loads((run / MARKER).read_text())
        (run / MARKER).write_text(json.dumps({**marker, name: checkpoint._facts(file)}))

    return change


def without_marker(run):
    shutil.copytree(run / LAST, run / "checkpoints/rl_000002")
    (run / "checkpoints/rl_000002/COMPLETE").unlink()
    incomplete(run)


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
    "state of 50,000 brackets": (write(STATE, "[" * 50_000), [], f"{{run}}/{STATE} {AGAIN}"),
    "signed brackets": (signed("state.json", "[" * 50_000), [], f"{{run}}/{STATE} {AGAIN}"),
    "signed list": (signed("state.json", "[]"), [], f"{{run}}/{STATE} {AGAIN}"),
    "signed step of 10**30": (signed("state.json", step=10**30), [], f"{{run}}/{STATE} {AGAIN}"),
    "signed step of another": (signed("state.json", step=7), [], f"{{run}}/{STATE} is not of this checkpoint; delete {{run}}/{LAST} to resume from the one before"),
    "signed step a text": (signed("state.json", step="1"), [], f"{{run}}/{STATE} is not of this checkpoint; delete {{run}}/{LAST} to resume from the one before"),
    "signed without a stage": (signed("state.json", stage=...), [], f"{{run}}/{STATE} is not of this checkpoint; delete {{run}}/{LAST} to resume from the one before"),
    **{f"signed {name} of another kind": (signed("state.json", **{name: value}), [], f"{{run}}/{STATE} holds no usable {name}; delete {{run}}/{LAST} to resume from the one before")
       for name, value in {"version": "1", "metrics_lines": -1, "evaluations": {"base": "x"}, "best": [1], "seconds": None, "versions": 3, "data": "x"}.items()},
    "marker a list": (write(MARKER, "[]"), [], f"{{run}}/{MARKER} {AGAIN}"),
    "marker of numbers": (write(MARKER, '{"state.json": 3}'), [], f"{{run}}/{MARKER} {AGAIN}"),
    "state a folder": (lambda run: ((run / STATE).unlink(), (run / STATE).mkdir()), [], f"{{run}}/{STATE} {AGAIN}"),
    "state without its step": (rewrite(STATE, step=...), [], f"{{run}}/{STATE} {AGAIN}"),
    "broken marker": (write(MARKER, "{"), [], f"{{run}}/{MARKER} {AGAIN}"),
    "no complete one": (incomplete, [], "resume={run}: there is no complete checkpoint in {run}/checkpoints (rl_000000, rl_000001: without COMPLETE); resume=never for a new run"),
    "another model": (nothing, ["model.tiny.layers=3"], "{run} was started with other settings (model.tiny.layers: 2 → 3); use those, or resume=never for a new run; a resumed run may change only "),
    "another setting": (nothing, ["rl.optimizer.lr=0.5"], "{run} was started with other settings (rl.optimizer.lr: 0.0004 → 0.5); use those, or resume=never for a new run; a resumed run may change only "),
    "another seed": (nothing, ["seed=7"], "{run} was started with other settings (seed: 0 → 7); use those, or resume=never for a new run; a resumed run may change only "),
    "no configuration": (gone("config.yaml"), [], "{run}/config.yaml is missing or damaged; resume=never for a new run"),
    "broken configuration": (write("config.yaml", "a: [1"), [], "{run}/config.yaml is missing or damaged; resume=never for a new run"),
    "configuration of 50,000 brackets": (write("config.yaml", "[" * 50_000), [], "{run}/config.yaml is missing or damaged; resume=never for a new run"),
    "configuration a list": (write("config.yaml", "- 1"), [], "{run}/config.yaml is missing or damaged; resume=never for a new run"),
    "configuration of another version": (write("config.yaml", "name: reverse\nrl: {pace: 3}"), [], "{run}/config.yaml: rl.pace: Key 'pace' not in 'RlConfig'; resume=never for a new run"),
    "configuration with another kind": (write("config.yaml", "name: reverse\nrl: {steps: many}"), [], "{run}/config.yaml: rl.steps: Value 'many' of type 'str' could not be converted to Integer; resume=never for a new run"),
    "configuration that calls a program": (write("config.yaml", "name: reverse\ndata: {_target_: os.system, command: x}"), [], "{run}/config.yaml: _target_=os.system is not defined by hybrid_rl's parts or a file of yours; if you trust it, name it on the command line"),
    "configuration that calls within": (write("config.yaml", "name: reverse\ndata: {_target_: hybrid_rl.recipes.reverse.load_tasks, a: [{_target_: torch.load}]}"), [], "{run}/config.yaml: _target_=torch.load is not defined by hybrid_rl's parts or a file of yours; if you trust it, name it on the command line"),
    "configuration that calls through a part": (write("config.yaml", "name: reverse\ndata: {_target_: hybrid_rl.sandbox.run.subprocess.run}"), [], "{run}/config.yaml: _target_=hybrid_rl.sandbox.run.subprocess.run is not defined by hybrid_rl's parts or a file of yours; if you trust it, name it on the command line"),
    "configuration that calls the package": (write("config.yaml", "name: reverse\ndata: {_target_: hybrid_rl.run_folder.files.remove}"), [], "{run}/config.yaml: _target_=hybrid_rl.run_folder.files.remove is not defined by hybrid_rl's parts or a file of yours; if you trust it, name it on the command line"),
    "a newer one without its marker, and no other": (without_marker, [], "resume={run}: there is no complete checkpoint in {run}/checkpoints (rl_000000, rl_000001, rl_000002: without COMPLETE); resume=never for a new run"),
    "a lock that is a link": (lambda run: (run / ".lock").symlink_to(run / "config.yaml"), [], "{run}/.lock cannot be locked: it is a link; remove it"),
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


PARTS = {  # what a stage takes from the state, of another kind
    "collector": (3, "TypeError: 'int' object is not subscriptable"),
    "learner": (..., "it is missing"),
    "optimizer": ({"steps": "x"}, "ValueError: invalid literal for int() with base 10: 'x'"),
    "alarms": ({}, "KeyError: 'first'"),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_the_state_of_another_kind(saved, tmp_path, go_on, name):
    value, reason = PARTS[name]
    run = shutil.copytree(saved, tmp_path / "run")
    signed("state.json", **{name: value})(run)
    code, said = go_on(run, "rl.steps=2")
    assert code == 1
    expected = f"holds no {name} for this run ({reason}); delete {run}/{LAST} to resume from the one before"
    assert said.splitlines()[-1] == f"hybrid_rl: {run}/{STATE} {expected}"


@pytest.fixture
def go_on(capsys, monkeypatch):
    """go_on(run, *overrides) resumes a run by its folder, and returns the exit code and what was said."""
    monkeypatch.setattr(stages, "Scorer", Counted)

    def go_on(run, *overrides):
        capsys.readouterr()
        code = stages.run(OmegaConf.to_object(load([f"resume={run}", *overrides])), run)
        return code, capsys.readouterr().out

    return go_on


def test_the_run_s_folder_brings_its_settings(saved, tmp_path):
    """Recipe, reward and every override that the run was started with; the command line changes what it names."""
    before, after = OmegaConf.load(saved / "config.yaml"), load([f"resume={saved}", "rl.steps=2"])
    assert after.rl.steps == 2
    assert before.rl.steps == 1
    after.rl.steps, after.resume = before.rl.steps, before.resume
    assert OmegaConf.to_yaml(after) == OmegaConf.to_yaml(before)


def test_a_group_on_the_command_line_is_compared(saved, tmp_path, last_line):
    line = last_line(f"resume={saved}", *SAME, "algo=dapo", "algo.minibatches=1", folder=str(saved))
    assert line.startswith(
        f"{saved} was started with other settings (algo.loss.clip_high: 0.2 → 0.28; algo.overlong_share: 0.0 → 0.2)"
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["+recipe=reverse_opd", "algo.teacher={run}/final"], "resume={run}: is a run of recipe reverse, not of reverse_opd; leave +recipe out"),
        (["rl.stepz=3"], "rl.stepz=3 (command line): there is no such key; did you mean rl.steps?"),
        (["reward.limit=3"], "reward.limit=3 (command line): there is no such key; there are: _target_; to add it, write +reward.limit=3"),
        (["rollout.group_size=3"], "rollout.group_size=3 (command line): does not divide rollout.batch_size=4; the nearest that does is 2"),
    ],
)  # fmt: skip
def test_overrides_of_a_saved_run_are_checked(saved, overrides, expected):
    with pytest.raises(ConfigError, match=f"^{re.escape(expected.format(run=saved))}$"):
        load([f"resume={saved}", *(o.format(run=saved) for o in overrides)])


@pytest.mark.parametrize("inside", ["config.yaml", "checkpoints", LAST])
def test_a_path_inside_a_run_s_folder(saved, inside):
    with pytest.raises(
        ConfigError, match=f"^{re.escape(f'resume={saved / inside} (command line): lies inside a run')}"
    ):
        load([f"resume={saved / inside}"])


def test_a_function_that_the_command_line_names_is_taken(saved, tmp_path):
    run = shutil.copytree(saved, tmp_path / "run")
    write(
        "config.yaml", (run / "config.yaml").read_text().replace("tests.bad_inputs.test_saved_runs.length", "math.fsum")
    )(run)
    with pytest.raises(ConfigError, match=r"_target_=math\.fsum is not defined by"):
        load([f"resume={run}"])
    assert load([f"resume={run}", "reward._target_=math.fsum"]).reward._target_ == "math.fsum"


def test_a_fresh_run_in_a_used_folder(saved, last_line):
    line = last_line(*SAME, folder=str(saved))
    used = "config.yaml, metrics.jsonl, summary.json, checkpoints, rollouts, base_model, final"
    assert line == f"{saved} holds a run already ({used}); choose another folder, or resume={saved} to go on with it"


def test_a_newer_checkpoint_without_its_marker_is_said(saved, tmp_path, go_on):
    run = shutil.copytree(saved, tmp_path / "run")
    (run / MARKER).unlink()
    code, said = go_on(run)
    assert code == 0, said
    assert "note:    passed over rl_000001, without COMPLETE: the run goes on from rl_000000\n" in said
    assert "step 1/1" in said


def test_a_checkpoint_on_another_disk(saved, tmp_path, go_on):
    """A linked one is resumed, and pruned as any other: the link goes, its target stays."""
    run, elsewhere = shutil.copytree(saved, tmp_path / "run"), tmp_path / "elsewhere"
    shutil.move(run / LAST, elsewhere)
    (run / LAST).symlink_to(elsewhere)
    for step in (2, 3):
        code, said = go_on(run, f"rl.steps={step}")
        assert code == 0, said
        assert f"step {step}/{step}" in said
    assert sorted(folder.name for folder in (run / "checkpoints").iterdir()) == ["rl_000002", "rl_000003"]
    assert (elsewhere / "COMPLETE").exists()


def test_a_linked_export_is_replaced(saved, tmp_path, go_on):
    run, elsewhere = shutil.copytree(saved, tmp_path / "run"), tmp_path / "elsewhere"
    shutil.move(run / "final", elsewhere)
    (run / "final").symlink_to(elsewhere)
    before = (elsewhere / "model.safetensors").read_bytes()
    code, said = go_on(run, "rl.steps=2")
    assert code == 0, said
    assert not (run / "final").is_symlink()
    assert (
        (elsewhere / "model.safetensors").read_bytes() == before != (run / "final" / "model.safetensors").read_bytes()
    )


OTHER = "the run began with other tasks (%s: rows were changed, added, removed or moved); use those, or resume=never for a new run"


@pytest.fixture(scope="module")
def of_files(tmp_path_factory):
    """A finished run of one step on files of tasks, and the folder of the files."""
    folder = tmp_path_factory.mktemp("of_files")
    for name, count in (("rl", 8), ("eval", 3)):
        (folder / f"{name}.jsonl").write_text(
            "".join(f'{{"prompt": "{name} {i}", "answer": "{i}"}}\n' for i in range(count))
        )
    (folder / "own_reward.py").write_text(
        "def reward(completion, task):\n    return len(completion) + sum(map(ord, completion)) / 1e6\n"
    )
    return folder


@pytest.mark.parametrize(
    ("file", "change", "expected"),
    [
        ("rl", lambda rows: rows[:-1], OTHER % "rl"),
        ("rl", lambda rows: [*rows, rows[0].replace("rl 0", "rl 9")], OTHER % "rl"),
        ("rl", lambda rows: rows[::-1], OTHER % "rl"),
        ("eval", lambda rows: [rows[0].replace('"0"', '"1"'), *rows[1:]], OTHER % "eval"),
        ("own_reward.py", lambda rows: [*rows, "# better\n"], "the reward's source changed since the run was saved: rewards before and after may not compare"),
        ("rl", lambda rows: rows, ""),
    ],
    ids=["one row fewer", "one row more", "another order", "another answer", "another reward", "nothing"],
)  # fmt: skip
def test_data_that_changed_since(of_files, tmp_path, monkeypatch, go_on, file, change, expected):
    folder = shutil.copytree(of_files, tmp_path / "data")
    monkeypatch.syspath_prepend(folder)
    run = tmp_path / "run"
    files = ["data._target_=hybrid_rl.data.files.load_tasks", f"+data.rl={folder}/rl.jsonl", f"+data.eval={folder}/eval.jsonl", "~data.min_length",
             "~data.max_length", "~data.eval_tasks", "rollout.max_prompt_tokens=200", "reward._target_=own_reward.reward"]  # fmt: skip
    assert stages.run(OmegaConf.to_object(load([*SMALL, *files])), run) == 0
    changed = folder / (file if "." in file else f"{file}.jsonl")
    changed.write_text("".join(change(changed.read_text().splitlines(keepends=True))))
    code, said = go_on(run, "rl.steps=2")
    if expected.startswith("the run began"):
        assert code == 1
        assert said == f"hybrid_rl: {run}/{LAST}: {expected}\n"
    else:
        assert code == 0
        assert "step 2/2" in said
        assert (f"note:    {expected}\n" in said) == bool(expected)
        assert ("reward's source" in said) == bool(expected)


class Counted(NoScorer):
    """Scores in this process: what a reward gives is not what these tests look at."""

    def __init__(self, *_, **__):
        self.rollouts = []

    def submit(self, rollout, task):
        self.rollouts.append(rollout)

    def finish(self):
        for rollout in self.rollouts:
            rollout.score(length(rollout.completion, None), {})
        self.rollouts.clear()
        return 0
