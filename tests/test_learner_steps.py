"""What a learner does with the batches of whole RL steps: silent groups, prices, parts that are missing, its state in checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl.config import (
    AlgoConfig,
    KlConfig,
    Reference,
)
from hybrid_rl.policy.model import Policy
from hybrid_rl.rl import train_rl
from hybrid_rl.rollout.rewards import RewardError
from hybrid_rl.run_folder import checkpoint
from tests.test_learner import part
from tests.test_rl import session


def trained(policy: Policy, folder: Path, reward: str, steps: int = 1, **algo: Any) -> list[dict[str, Any]]:
    s = session(policy, folder, reward, steps=steps)
    s.config.algo = replace(AlgoConfig(), **algo)
    try:
        train_rl(s)
    finally:
        s.scorer.close()
        s.metrics.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_greedy_baseline_gives_silent_groups_a_signal(policy, tmp_path):
    """The reward counts letters: a group may well be silent, and yet above or below its greedy completion."""
    (line,) = trained(
        policy, tmp_path, "length", advantage=part("remax.advantages"), loss=part("reinforce.loss"), silent_by="none"
    )
    assert line["rollouts"] == 4
    assert line["silent_groups"] == 0
    assert line["grad_norm"] > 0


def test_without_a_filter_silent_groups_are_trained_on(policy, tmp_path):
    (line,) = trained(policy, tmp_path, "constant", silent_by="none")
    assert (line["rollouts"], line["silent_groups"], line["replacement_rounds"]) == (4, 0, 0)
    assert line["loss"] == 0


def test_an_overlong_price_is_a_part_of_its_own_and_not_the_outcome(policy, tmp_path):
    """All outcomes are equal, so every group is silent, whatever lengths add to the reward."""
    (line,) = trained(policy, tmp_path, "constant", overlong_share=1.0, overlong_penalty=2.0)
    assert line["silent_groups"] > 0
    assert line["rollouts"] == 0
    assert line["parts"]["overlong"] == -2.0  # all reach the limit
    assert line["reward"] == pytest.approx(sum(line["parts"].values()))


def test_a_part_that_no_reward_has_ends_the_run_with_its_name(policy, tmp_path):
    with pytest.raises(RewardError, match=r"algo\.silent_by=colour: the reward has no such part; it has reward"):
        trained(policy, tmp_path, "constant", silent_by="colour")


def test_what_the_learner_knows_is_in_the_checkpoint(policy, tmp_path):
    trained(
        policy, tmp_path, "hash_of_answer", reference=Reference.frozen, kl=KlConfig(coef=0.1, target=1e-9, horizon=10)
    )
    assert checkpoint.latest(tmp_path / "checkpoints").state["learner"]["kl_coef"] == pytest.approx(0.1 * (1 - 0.02))
