"""The command as a user meets it: a whole small run, what it leaves, and going on from there. Kills and other faults: tests/faults."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybrid_rl.run_folder.files import alone_in
from hybrid_rl.run_folder.rollouts import read_rollouts
from tests.forked import Forked

pytestmark = pytest.mark.slow

SMALL = [
    "+recipe=reverse", "sft.steps=20", "sft.checkpoint_every=8", "rl.steps=6", "rl.checkpoint_every=2", "rl.eval_every=4",
    "eval.max_tasks=8", "rollout.batch_size=16", "rollout.group_size=4", "rollout.max_tokens=24", "model.tiny.hidden_size=64", "algo.minibatches=2",
    "rl.max_empty_steps=0",
]  # fmt: skip
PROJECT = str(Path(__file__).parents[1])  # for the tests' own rewards and losses
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([PROJECT, *filter(None, [os.environ.get("PYTHONPATH")])]),
}
TIMES = {"seconds", "memory", "memory_gib", "memory_reserved_gib", "memory_device_gib", "tokens_per_second"}


def start(folder: Path, *overrides: str, fresh: bool = False) -> subprocess.Popen | Forked:
    """Start a small run in `folder`, in a new interpreter if `fresh`; so is a sweep: its plugins act when the interpreter ends."""
    if not (fresh or "-m" in overrides):
        return Forked("hybrid_rl.run", [*SMALL, *overrides], folder, ENVIRONMENT)
    command = [sys.executable, "-m", "hybrid_rl.run", *SMALL, *overrides]
    return subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(folder: Path, *overrides: str, code: int = 0, fresh: bool = False) -> str:
    process = start(folder, *overrides, fresh=fresh)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == code, output
    return output


def command(folder: Path, *arguments: str, module: str = "hybrid_rl.run") -> str:
    """Return what a command prints that reaches its end."""
    process = Forked(module, arguments, folder, ENVIRONMENT)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


def run_folder(folder: Path) -> Path:
    (found,) = (folder / "outputs" / "reverse").iterdir()
    return found


def metrics(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run_folder(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def rollouts(folder: Path) -> dict[str, list[dict]]:
    return {f.name: read_rollouts(f) for f in sorted((run_folder(folder) / "rollouts").glob("*.parquet"))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, str]:
    """A run that nothing interrupted, and what it printed."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, fresh=True)


def test_what_a_user_reads(whole):
    folder, output = whole
    lines = output.splitlines()
    assert sum(line.startswith("step ") for line in lines) == 6
    step = next(line for line in lines if line.startswith("step 1/6"))
    for field in ("reward", "len", "trunc", "entropy", "mismatch", "clip", "grad", "tok/s", "GiB", "rollout", "update"):
        assert field in step
    assert "evaluation of the base model: reward 0.0" in output
    assert "evaluation of the model after SFT" in output
    assert "evaluation of the model after RL" in output
    assert "\x1b[" not in output  # no colours and no bars in a pipe
    for name in ("report.html", "samples.md", "final"):
        assert str(run_folder(folder).relative_to(folder) / name) in output


def test_what_a_run_leaves(whole):
    folder = run_folder(whole[0])
    names = {p.name for p in folder.iterdir()}
    assert names == {
        "config.yaml",
        "clock.txt",
        "origin.json",
        "metrics.jsonl",
        "summary.json",
        "report.html",
        "samples.md",
        "rollouts",
        "checkpoints",
        "final",
        "base_model",
    }
    origin = json.loads((folder / "origin.json").read_text())
    assert origin["command"] == shlex.join(["python", "-m", "hybrid_rl.run", *SMALL])
    summary = json.loads((folder / "summary.json").read_text())
    assert {"eval/base", "eval/sft", "eval/rl", "seconds", "versions", "seed"} <= summary.keys()
    assert summary["eval/base"] <= 0.1
    assert {"sft", "rl", "eval", "total"} <= summary["seconds"].keys()
    assert [p.name for p in sorted((folder / "checkpoints").iterdir())] == ["rl_000004", "rl_000006"]
    stages = [line["stage"] for line in metrics(whole[0])]
    assert stages == ["eval", "sft", "sft", "eval", *["rl"] * 4, "eval", *["rl"] * 2, "eval"]


def test_mismatch_and_versions(whole):
    steps = [line for line in metrics(whole[0]) if line["stage"] == "rl"]
    assert [line["version"] for line in steps] == list(range(1, 7))
    assert all(line["mismatch_kl"] < 1e-6 for line in steps)
    trained = [r for r in rollouts(whole[0])["step_0003.parquet"] if r["trained"]]
    assert trained
    for r in trained:
        assert r["versions"] == [(2, sum(r["loss_mask"]))]  # step 3 samples from what two updates made


def test_a_batch_is_used_for_one_optimizer_step_a_minibatch(whole):
    """algo.minibatches=2: the groups of a step in two shares, or in one where there was only one group with a signal."""
    trained = [
        {r["group_id"] for r in rows if r["trained"]}
        for name, rows in rollouts(whole[0]).items()
        if name.startswith("step_")
    ]
    expected = sum(min(2, len(groups)) for groups in trained)
    state = json.loads((run_folder(whole[0]) / "checkpoints" / "rl_000006" / "state.json").read_text())
    assert state["optimizer"]["steps"] == expected > 6


def test_the_final_model_is_an_ordinary_folder(whole):
    folder = run_folder(whole[0])
    model = AutoModelForCausalLM.from_pretrained(folder / "final")
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    weights = load_file(folder / "checkpoints" / "rl_000006" / "policy.00000-of-00001.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights.items())
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "abc"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert model.generate(**prompt, max_new_tokens=3, do_sample=False).shape[1] > prompt["input_ids"].shape[1]


def same(a: Path, b: Path) -> None:
    assert metrics(a) == metrics(b)
    assert rollouts(a) == rollouts(b)
    one, two = (load_file(run_folder(f) / "final" / "model.safetensors") for f in (a, b))
    assert all(torch.equal(one[name], two[name]) for name in one)


def kill_when(process: subprocess.Popen, text: str, delay: float = 0.0) -> None:
    """SIGKILL once a line with `text` was printed, or after the output ended."""
    for line in process.stdout:
        if text in line:
            time.sleep(delay)
            break
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    process.stdout.close()


def copied(whole: tuple[Path, str], folder: Path) -> Path:
    """The whole run's folder, to go on from."""
    shutil.copytree(whole[0] / "outputs", folder / "outputs")
    return run_folder(folder)


def test_resume_refuses_other_settings(whole, tmp_path):
    folder = copied(whole, tmp_path)
    for dry in ([], ["dry_run=true"]):
        output = run(tmp_path, f"resume={folder}", "rl.optimizer.lr=0.5", *dry, code=1)
        assert re.search(r"was started with other settings \(rl.optimizer.lr: \S+ → 0.5\)", output)
        assert re.search(r"; a resumed run may change only rl.steps, .*, checkpoint\.\*, .*tracker\.\*", output)
    assert "rl_000006 is past rl.steps=3" in run(tmp_path, f"resume={folder}", "rl.steps=3", code=1)


def test_more_steps_continue_a_finished_run_by_its_folder(whole, tmp_path):
    folder = copied(whole, tmp_path)
    output = run(tmp_path, f"resume={folder}", "rl.steps=7")
    assert "step 7/7" in output
    assert "step 6/" not in output
    assert [line["step"] for line in metrics(tmp_path) if line["stage"] == "rl"] == list(range(1, 8))
    before, after = (json.loads((f / "summary.json").read_text())["seconds"] for f in (run_folder(whole[0]), folder))
    assert after["rl"] > before["rl"]  # what the resumed run spent is added to what was spent before
    assert after["sft"] == before["sft"]


def test_two_processes_never_share_a_folder(whole, tmp_path):
    folder = copied(whole, tmp_path)
    with alone_in(folder):
        assert f"another process is writing to {folder}" in run(tmp_path, f"resume={folder}", code=1)
    assert not (folder / ".lock").exists()


def test_a_dry_run_shows_the_plan_and_leaves_nothing(tmp_path):
    output = command(tmp_path, "+recipe=reverse", "dry_run=true")
    assert "ranks      1" in output
    assert "8 tasks × 16 = 128 rollouts" in output
    assert "rows of 2,048" in output
    assert "GiB" in output
    assert list(tmp_path.iterdir()) == []


def test_errors_end_in_one_line(tmp_path):
    output = run(tmp_path, "data.eval_tasks=0", code=1)
    assert "the eval set has 0 tasks" in output
    assert "Traceback" not in output
    output = run(tmp_path, "rollout.max_prompt_tokens=10", code=1)
    assert "its prompt has" in output
    assert "Traceback" not in output
    if not torch.cuda.is_available():
        assert "torch sees no GPU; use device=cpu" in run(tmp_path, "device=cuda", code=1)


def test_the_folder_alone_says_how_to_go_on(whole, tmp_path):
    """No recipe and no override is repeated; what the run was started with is kept."""
    folder = copied(whole, tmp_path)
    output = command(tmp_path.parent, f"resume={folder}", "rl.steps=7")
    assert "note:    changed since it was started: rl.steps: 6 → 7\n" in output
    assert output.count("changed since") == 1
    assert "step 7/7" in output


def test_a_finished_model_is_evaluated_again(whole, tmp_path):
    """Nothing is trained, saved or exported, and the line does not call it the base model; rewards are those of the run's own evaluation."""
    model = run_folder(whole[0]) / "final"
    output = command(tmp_path, *SMALL, f"model.path={model}", f"eval.against={model}", module="hybrid_rl.evaluate")
    lines = [line for line in output.splitlines() if line.startswith("evaluation")]
    (before,) = [line for line in whole[1].splitlines() if line.startswith("evaluation of the model after RL")]
    assert lines[0] == before.replace("the model after RL", "the model")
    assert re.fullmatch(r"evaluation reward: model 0\.\d{3}   \(\d+ s in all\)", lines[1])
    folder = run_folder(tmp_path)
    assert not {"checkpoints", "final", "base_model"} & {p.name for p in folder.iterdir()}
    assert [p.name for p in (folder / "rollouts").iterdir()] == ["eval_model.parquet"]
    assert {key for key in json.loads((folder / "summary.json").read_text()) if key.startswith("eval/")} == {
        "eval/model"
    }
    found = json.loads((folder / "versus.json").read_text())  # of a model and itself: the same tasks and seeds
    assert (found["tasks"], found["left_out"]) == (8, 0)
    assert found["all"]["reward"] == {"difference": 0.0, "interval": [0.0, 0.0], "p": 1.0}
    assert "  all tasks (8): reward +0.000 [+0.000, +0.000] p 1, correct +0.000" in output


SCRIPT = f"""
from hybrid_rl.run import main

SMALL = {[*SMALL, "sft.steps=0", "rl.steps=0", "eval.max_tasks=2"]}
print("codes", main(SMALL), main([*SMALL, "seed=1"]), main([*SMALL, "seed=-1"]))
"""


def test_a_script_calls_main_twice_and_needs_no_main_guard(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    result = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=240
    )
    assert result.stdout.splitlines()[-1] == "codes 0 0 2", result.stderr
    assert result.stderr == "hybrid_rl: seed=-1 (command line): must be at least 0\n"
    assert len(list((tmp_path / "outputs" / "reverse").iterdir())) == 2


def test_data_seed_varies_the_order_of_tasks_alone(tmp_path):
    """The same model and the same random numbers of sampling; other tasks."""
    for name, seeds in {"one": [], "two": ["data_seed=1"]}.items():
        run(tmp_path, "sft.steps=0", "rl.steps=1", *seeds, f"hydra.run.dir={name}")
    one, two = (
        read_rollouts(tmp_path / name / "rollouts" / "step_0001.parquet")[:16] for name in ("one", "two")
    )  # those of the first round; how many are replaced depends on the tasks
    assert {r["task_id"] for r in one}.isdisjoint(r["task_id"] for r in two)
    assert [r["seed"] for r in one] == [r["seed"] for r in two]
    models = [(tmp_path / name / "base_model" / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert models[0] == models[1]


@pytest.mark.parametrize("launcher", ["basic", pytest.param("joblib", marks=pytest.mark.slow)])
def test_a_sweep_s_exit_code_is_that_of_its_jobs(tmp_path, launcher):
    """Also when Hydra's launcher runs them in other processes. One that fails does not end the others."""
    if launcher == "joblib":
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    jobs = ["-m", f"hydra/launcher={launcher}", "sft.steps=0", "rl.steps=0", "eval.max_tasks=2"]
    output = run(tmp_path, *jobs, "data.eval_tasks=0,2", code=1)
    assert output.count("the eval set has 0 tasks") == 1
    assert output.count("evaluation reward:") == 1
    if launcher == "joblib":
        assert run(tmp_path, *jobs, "seed=3,4", "hydra.sweep.dir=two", code=0).count("evaluation reward:") == 2
        seeds = [json.loads(p.read_text())["seed"] for p in sorted(tmp_path.glob("two/*/summary.json"))]
        assert seeds == [3, 4]


@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_a_signal_ends_a_sweep_and_every_job_saves(tmp_path, launcher):
    if launcher == "joblib":
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    parallel = ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    process = start(
        tmp_path, "sft.steps=0", "rl.steps=9999", "-m", f"hydra/launcher={launcher}", *parallel, "seed=0,1,2"
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if sum(line.startswith("step ") for line in lines) == 2 * (1 + len(parallel)):
            break
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert rest.count("of RL is done and saved") == 1 + len(parallel)
    assert "".join(lines).count("sweep job") + rest.count("sweep job") == 1 + len(parallel)


def test_doctor_names_what_can_run():
    result = subprocess.run([sys.executable, "-m", "hybrid_rl.doctor"], capture_output=True, text=True, check=True)
    assert "engine local" in result.stdout
    assert "GPU" in result.stdout
