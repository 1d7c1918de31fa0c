"""Memory and disk that a run takes: as predicted, and told before the model loads where the machine cannot have it."""

import dataclasses
import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from hybrid_rl import stages
from hybrid_rl.policy.model import Policy
from hybrid_rl.preflight import budget
from hybrid_rl.preflight.budget import BudgetError, check_budget, disk_bytes, measure, memory_by_phase, rollout_bytes
from hybrid_rl.preflight.settings import load
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.run_folder.rollouts import write_rollouts
from hybrid_rl.types import Group, Rollout, Task
from tests.bad_inputs.conftest import SMALL

CPU = torch.device("cpu")


def configured(*overrides: str):
    return OmegaConf.to_object(load([*SMALL, "rollout.max_prompt_tokens=200", *overrides]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [[], ["algo.reference=frozen", "algo.kl.coef=0.01"], ["rl.keep_checkpoints=1", "rl.steps=3"]]
)
def test_the_disk_that_a_run_took_is_that_of_the_arithmetic(tmp_path: Path, more: list[str]):
    config = configured(
        "sft.steps=2", "rl.steps=2", "rl.checkpoint_every=1", "reward._target_=tests.faults.parts.hashed", *more
    )
    assert stages.run(config, tmp_path) == 0
    parts = [f for name in ("checkpoints", "final", "base_model") for f in (tmp_path / name).rglob("*.safetensors")]
    at_the_end = dataclasses.replace(
        config.rl, keep_checkpoints=config.rl.keep_checkpoints - 1
    )  # none is being written any more
    expected = disk_bytes(dataclasses.replace(config, rl=at_the_end), measure(config, tmp_path / "base_model"))
    assert sum(f.stat().st_size for f in parts) == pytest.approx(expected, rel=0.03)


def test_rollouts_on_the_disk_are_those_of_the_arithmetic(tmp_path: Path):
    """Completions of full length, of tokens that do not repeat; the evaluations and the kept steps of a run."""
    numbers, rollouts = random.Random(0), []
    task = Task("t", ({"role": "user", "content": "?"},), "")
    for i in range(64):
        made = Rollout(
            "t",
            0,
            i,
            i,
            [numbers.randrange(150_000) for _ in range(100)] if not rollouts else list(rollouts[0].token_ids[:100]),
        )
        ids = [int(min(150_000, numbers.paretovariate(0.3))) for _ in range(512)]
        made.add_sampled(ids, [-numbers.expovariate(2) for _ in ids], [(1, len(ids))])
        made.finish("stop", " ".join(f"{i:x}"[-5:] for i in ids))
        made.score(1.0, {"a": 1.0})
        rollouts.append(made)
    draw = np.random.default_rng(0)
    tokens = {
        (0, i): {"log_ratios": draw.normal(0, 0.01, 512), "entropies": draw.exponential(1, 512)} for i in range(64)
    }
    write_rollouts(tmp_path / "a.parquet", [Group(0, task, rollouts)], ["prompt"], {}, [], tokens)
    plain = ["rollout.batch_size=64", "rollout.max_tokens=512", "sft.steps=0", "eval.samples=2", "eval.max_tasks=8"]
    one = rollout_bytes(configured(*plain, "rl.steps=1"), 0)
    assert (tmp_path / "a.parquet").stat().st_size == pytest.approx(one, rel=0.3)
    evaluation = rollout_bytes(configured(*plain, "rl.steps=0"), 100)
    assert evaluation == one * 2 * 8 / 64
    assert (
        rollout_bytes(configured(*plain, "rl.steps=1000", "rollout.keep_steps=0"), 100) == 1000 * one + 2 * evaluation
    )
    assert (
        rollout_bytes(configured(*plain, "rl.steps=1000", "rollout.keep_steps=9", "rl.eval_every=5"), 100)
        == 10 * one + 4 * evaluation
    )


def test_too_little_disk(tmp_path: Path, capsys: pytest.CaptureFixture):
    config = configured("rl.steps=1000000000", "rl.keep_checkpoints=1000000000", "rl.checkpoint_every=1")
    assert stages.run(config, tmp_path) == 1
    line = capsys.readouterr().out.splitlines()[-1]
    free = r"and [\d.]+ GiB are free in " + re.escape(str(tmp_path))
    assert re.match(
        rf"hybrid_rl: checkpoints and the exported model take \d+\.\d GiB, {free}; free disk space, choose another disk with output_dir,",
        line,
    )
    assert not (tmp_path / "metrics.jsonl").exists()


def test_what_lies_there_already_is_not_missing(tmp_path: Path, tiny_folder: Path):
    """A run that goes on beside its own checkpoints."""
    config = configured(f"model.path={tiny_folder}", "rl.steps=9", "rl.checkpoint_every=1")
    sizes, free = measure(config, tiny_folder), shutil.disk_usage(tmp_path).free
    config.rl.steps = config.rl.keep_checkpoints = int(1.5 * free / (12 * sizes.trainable))
    with pytest.raises(BudgetError, match="free disk space"):
        check_budget(config, sizes, CPU, Ranks(), tmp_path / "run")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with (tmp_path / "run" / "checkpoints" / "sparse").open("wb") as file:
        file.truncate(free)
    check_budget(config, sizes, CPU, Ranks(), tmp_path / "run")


def test_too_little_memory(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """A model of terabytes, by its configuration alone; its weights are never opened."""
    shutil.copytree(tiny_folder, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({**config, "hidden_size": 2**16, "intermediate_size": 2**20})
    )
    monkeypatch.setattr(Policy, "load", None)
    assert stages.run(configured(f"model.path={tmp_path / 'model'}"), tmp_path / "run") == 1
    line = capsys.readouterr().out.splitlines()[-1]
    assert re.match(
        r"hybrid_rl: training takes at least \d+\.\d GiB a rank \(parameters \d+\.\d, gradients \d+\.\d, Adam moments \d+\.\d\), and \d+\.\d GiB are free; use a ",
        line,
    )


GIB = 2**30


@pytest.fixture
def of_one_gib(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A configuration, and the sizes of a model whose parameters, gradients and moments take three quarters of the GiB that is free."""
    monkeypatch.setattr(budget, "free_memory", lambda: GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(100 * GIB, 0, 100 * GIB))
    config = configured(f"model.path={tiny_folder}")
    return config, dataclasses.replace(
        measure(config, tiny_folder), parameters=int(0.75 * GIB / 16), trainable=int(0.75 * GIB / 16)
    )


def test_two_ranks_of_a_machine_share_its_memory(of_one_gib, tmp_path: Path):
    config, sizes = of_one_gib
    check_budget(config, sizes, CPU, Ranks(), tmp_path)
    config.policy.shard = 1
    with pytest.raises(
        BudgetError,
        match=r"training takes at least 0\.9 GiB a rank .* 0\.5 GiB are free; use a smaller model, more ranks, policy.lora.rank=16 \(",
    ):
        check_budget(config, sizes, CPU, Ranks(0, 2, 0, 2), tmp_path)


def test_evaluations_alone_need_no_gradients(of_one_gib, tmp_path: Path):
    config, sizes = of_one_gib
    sizes = dataclasses.replace(sizes, parameters=2 * sizes.parameters, trainable=2 * sizes.parameters)
    with pytest.raises(BudgetError, match="training takes at least"):
        check_budget(config, sizes, CPU, Ranks(), tmp_path)
    config.rl.steps = 0
    check_budget(config, sizes, CPU, Ranks(), tmp_path)


def test_on_a_gpu_one_scorer_is_there_at_a_time_and_before_gradients(of_one_gib):
    config, sizes = of_one_gib
    sizes = dataclasses.replace(sizes, beside={"reference": sizes.parameters, "teacher": 5 * sizes.parameters})
    memory = memory_by_phase(config, sizes, torch.device("cuda"), Ranks())
    unit = 4 * sizes.parameters / GIB
    assert memory["scoring"]["teacher"] == pytest.approx(5 * unit)
    assert not {"reference", "gradients"} & memory["scoring"].keys()
    assert not {"reference", "teacher"} & memory["training"].keys()
    assert memory["training"]["gradients"] == pytest.approx(unit)
    together = memory_by_phase(config, sizes, CPU, Ranks())["training"]
    assert together["reference"] + together["teacher"] == pytest.approx(6 * unit)
