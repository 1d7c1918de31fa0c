"""Distillation of a run of `reverse` into a smaller model: the recipe's settings, its tasks, its advantage."""

import pytest
import torch
from hybrid_rl.recipes import reverse
from hybrid_rl.recipes.reverse_opd import load_tasks

from hybrid_rl.algo import mean_only, opd
from hybrid_rl.algo.batch import Scored
from hybrid_rl.config import ConfigError
from hybrid_rl.preflight.settings import load

RECIPE = "+recipe=reverse_opd"


def test_the_recipe_composes(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = load([RECIPE, f"algo.teacher={tmp_path}"])
    assert (config.name, config.data["_target_"]) == ("reverse_opd", "hybrid_rl.recipes.reverse_opd.load_tasks")
    assert config.algo.advantage == {
        "_target_": "hybrid_rl.algo.opd.centered",
        "weight": 1.0,
        "reward": None,
        "limit": 5.0,
    }
    assert (config.algo.loss["_target_"], config.algo.silent_by) == ("hybrid_rl.algo.ppo_clip.loss", "none")
    teachers = load(["+recipe=reverse"])
    assert config.reward == teachers.reward
    assert config.model.tiny.words == teachers.model.tiny.words  # one vocabulary
    assert config.model.tiny.hidden_size < teachers.model.tiny.hidden_size


def test_a_teacher_is_asked_for():
    with pytest.raises(ConfigError, match=r"algo.teacher=None \(default\): is missing"):
        load([RECIPE])


def test_only_demonstrations_are_short():
    sizes = ("s", 8, 24, 128)
    every, some = reverse.load_tasks(*sizes), load_tasks(*sizes, longest_demonstration=17)
    assert (some.rl, some.eval) == (every.rl, every.eval)
    assert {t.id for t in some.sft} == {t.id for t in every.sft if len(t.answer) <= 17}
    assert max(len(t.answer) for t in some.eval) == 24


def test_centered_by_hand():
    """log π_teacher − log π_behaviour 1, −9, 0: clamped to ±5 the mean is −4/3."""
    columns = {
        "teacher_logprobs": torch.tensor([-1.0, -10.0, -2.0]),
        "behaviour_logprobs": torch.tensor([-2.0, -1.0, -2.0]),
    }
    batch = Scored(
        outcomes=torch.tensor([1.0, 0.0]), group_sizes=[2], lengths=torch.tensor([1, 2]), kept=torch.ones(2, dtype=torch.bool),
        old_logprobs=columns["behaviour_logprobs"], **columns,
    )  # fmt: skip
    expected = torch.tensor([7.0, -11.0, 4.0]) / 3
    assert torch.allclose(opd.centered(batch, limit=5.0), expected)
    assert torch.allclose(
        opd.centered(batch, 2.0, mean_only.advantages), 2 * expected + torch.tensor([0.5, -0.5, -0.5])
    )
