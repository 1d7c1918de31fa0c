"""A run's prompts have one date: in evaluations and steps, and after a resume on another day."""

import pytest
from omegaconf import OmegaConf

from hybrid_rl import stages
from hybrid_rl.config import TinyConfig
from hybrid_rl.policy import tiny
from hybrid_rl.preflight.settings import load
from hybrid_rl.run_folder.clock import FILE, read_clock
from hybrid_rl.run_folder.rollouts import read_rollouts
from tests.bad_inputs.conftest import SMALL


def prompts(folder, name):
    return [row["prompt"] for row in read_rollouts(folder / "rollouts" / f"{name}.parquet")]


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_date(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.create(tmp_path / "model", TinyConfig(hidden_size=32, intermediate_size=64), 0)
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text("{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}" + template.read_text())
    settings = [
        *SMALL, "model.path=model", "rollout.max_prompt_tokens=200", "data.max_length=12", "sft.steps=1", "sft.batch_size=2",
        "reward._target_=tests.bad_inputs.test_saved_runs.length", "data.template_arguments={}",
    ]  # fmt: skip
    folder = tmp_path / "run"
    assert stages.run(OmegaConf.to_object(load(settings)), folder) == 0
    began = f"{read_clock(folder):%Y-%m-%d %H:%M:%S}.000000"
    assert all(
        began in prompt
        for name in ("eval_base", "eval_sft", "step_0001", "eval_rl")
        for prompt in prompts(folder, name)
    )

    (folder / FILE).write_text("2001-02-03T04:05:06\n")
    assert stages.run(OmegaConf.to_object(load([*settings, "rl.steps=2", "resume=run"])), folder) == 0
    assert all(
        "2001-02-03 04:05:06.000000" in prompt for name in ("step_0002", "eval_rl") for prompt in prompts(folder, name)
    )
    assert all(began in prompt for prompt in prompts(folder, "step_0001"))
