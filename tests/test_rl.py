"""The loop itself: the order of its phases, and what a step does when there is nothing to learn from."""

import json
import re
from functools import partial

import pytest
import torch

from hybrid_rl.config import Config, EvalConfig, OptimizerConfig, RlConfig, RolloutConfig
from hybrid_rl.data import TaskSets
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.policy.model import Policy
from hybrid_rl.rl import NothingTrained, train_rl
from hybrid_rl.rollout.rewards import Scorer
from hybrid_rl.run_folder import checkpoint
from hybrid_rl.run_folder.rollouts import read_rollouts
from hybrid_rl.session import Session
from hybrid_rl.types import Task
from tests.sessions import make_session


class Recorder(LocalEngine):
    """The real engine, and a list of what was asked of it; it also notes when the policy's weights changed between two calls."""

    def __init__(self, policy: Policy):
        super().__init__(policy.model, policy.end_ids(), 16, 64)
        self.calls: list[str] = []
        self._seen = self._sum()

    def _sum(self) -> float:
        return sum(float(p.detach().double().abs().sum()) for p in self.model.parameters())

    def note(self, call: str) -> None:
        if self._sum() != self._seen:
            self.calls.append("(weights changed)")
            self._seen = self._sum()
        self.calls.append(call)

    def generate(self, requests, sampling):
        self.note(f"generate v{self.version}")
        return super().generate(requests, sampling)

    def sleep(self, tags=("kv_cache",)):
        self.note(f"sleep {'+'.join(tags)}")
        return super().sleep(tags)

    def wake(self, tags=("kv_cache",)):
        self.note(f"wake {'+'.join(tags)}")
        super().wake(tags)

    def set_version(self, version):
        self.note(f"version {version}")
        super().set_version(version)


def session(policy, tmp_path, reward: str, engine: LocalEngine | None = None, **rl) -> Session:
    tasks = {
        name: [Task(f"{name}{i}", ({"role": "user", "content": "x" * (i + 1)},), str(i)) for i in range(8)]
        for name in ("rl", "eval")
    }
    config = Config(
        rollout=RolloutConfig(batch_size=4, group_size=2, max_tokens=6, max_prompt_tokens=40, max_replacements=1),
        rl=RlConfig(checkpoint_every=10, optimizer=OptimizerConfig(lr=1e-3), **rl),
        eval=EvalConfig(max_tasks=2),
    )
    scorer = Scorer({"_target_": f"tests.rewards.{reward}"}, workers=1, timeout=5)
    sets = TaskSets([], tasks["rl"], tasks["eval"])
    return make_session(config, tmp_path, policy, engine or Recorder(policy), sets, scorer)


def noted(engine, call, real):
    engine.note(call)
    return real()


def test_the_order_of_a_steps_phases(policy, tmp_path, monkeypatch):
    """Weights awake before they are handed over, the KV cache last; evaluation while the engine is awake; sleep before the update."""
    s = session(policy, tmp_path, "hash_of_answer", steps=2, eval_every=1)
    for name in ("gather", "reshard", "park", "unpark"):  # the trainer's side of a turn
        monkeypatch.setattr(policy, name, partial(noted, s.handover.engine, f"policy {name}", getattr(policy, name)))
    try:
        train_rl(s)
    finally:
        s.scorer.close()
    hand_over = ["wake weights", "policy gather", "version {}", "policy park", "wake kv_cache"]
    evaluation = ["generate v{}"]
    train = ["generate v{}", "sleep kv_cache+weights", "policy reshard", "policy unpark", "(weights changed)"]
    first, second = (
        [c.format(0) for c in (*hand_over, *train)],
        [c.format(1) for c in (*hand_over, *evaluation, *train)],
    )
    assert [call for call in s.handover.engine.calls if call] == first + second[
        :-1
    ]  # the last update is seen by nobody yet
    assert (s.handover.engine.version, s.progress.version) == (1, 2)


def test_a_step_without_any_signal_changes_nothing_and_says_so(policy, tmp_path, capsys):
    before = [p.detach().clone() for p in policy.model.parameters()]
    s = session(policy, tmp_path, "constant", steps=1)
    try:
        train_rl(s)
    finally:
        s.scorer.close()
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))
    line = capsys.readouterr().out
    assert "4 silent groups replaced" in line
    assert "2 groups missing" in line
    assert "! nothing was trained: every group was dropped" in line
    assert not re.search("entropy|mismatch|clip|grad|nan|None", line), line
    (record,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [record[key] for key in ("loss", "entropy", "mismatch_kl", "clip_fraction", "grad_norm")] == [None] * 5
    assert (record["trained"], record["nothing_trained"], record["skipped"]) == (0, "silent", 0)
    assert not any(row["trained"] for row in read_rollouts(tmp_path / "rollouts" / "step_0001.parquet"))
    assert checkpoint.latest(tmp_path / "checkpoints").state["optimizer"]["steps"] == 0
    assert (s.progress.trained_steps, s.progress.empty_steps) == (0, 1)


def test_truncated_rollouts_that_are_masked_are_not_called_trained(policy, tmp_path, capsys):
    s = session(policy, tmp_path, "hash_of_answer", steps=1)
    s.config.algo.mask_truncated, s.config.algo.silent_by, s.config.rollout.max_tokens = True, "none", 1
    try:
        train_rl(s)
    finally:
        s.scorer.close()
    assert (
        "nothing was trained: every rollout reached rollout.max_tokens, and algo.mask_truncated"
        in capsys.readouterr().out
    )
    rows = read_rollouts(tmp_path / "rollouts" / "step_0001.parquet")
    assert {(row["trained"], row["finish_reason"]) for row in rows} == {(False, "length")}
    assert all(row["outcome"] == row["reward"] for row in rows)


def test_steps_in_a_row_that_train_nothing_end_the_run_saved(policy, tmp_path, capsys):
    """Counted on after a resume; a step that trains begins the count anew."""
    s = session(policy, tmp_path, "constant", steps=9, max_empty_steps=3)
    s.progress.empty_steps, s.progress.trained_steps = 1, 4  # as a checkpoint says
    with pytest.raises(
        NothingTrained,
        match=r"in 3 RL steps in a row \(rl.max_empty_steps=3\), in step 2 because every group .* check the reward",
    ):
        train_rl(s)
    s.scorer.close()
    state = checkpoint.latest(tmp_path / "checkpoints").state
    assert (state["step"], state["empty_steps"], state["trained_steps"]) == (2, 3, 4)
    s.progress.count_step("not_finite")
    assert (s.progress.empty_steps, s.progress.trained_steps) == (3, 4)
    s.progress.count_step(None)
    assert (s.progress.empty_steps, s.progress.trained_steps) == (0, 5)
