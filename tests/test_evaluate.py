"""Evaluation on the real engine: what it counts, against what is stored of each sample."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pyarrow.parquet as pq
import pytest

from hybrid_rl.config import Config, EvalConfig, RolloutConfig
from hybrid_rl.data import TaskSets
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.evaluate import evaluate
from hybrid_rl.policy.model import Policy
from hybrid_rl.report import versus
from hybrid_rl.report.console import Console, eval_line, source_lines
from hybrid_rl.report.scores import scores
from hybrid_rl.rollout.rewards import Scorer
from hybrid_rl.run_folder.rollouts import write_rollouts
from hybrid_rl.types import Group, Rollout, Task
from tests.sessions import make_session


class Evaluation:
    """One evaluation: what it wrote, printed and stored."""

    def __init__(self, policy: Policy, folder: Path, reward: str, sources: tuple[str, ...] = ("",), **settings: Any):
        tasks = [
            Task(f"e{i}", ({"role": "user", "content": "x" * (i + 1)},), str(i), source=sources[i % len(sources)])
            for i in range(6)
        ]
        rollout = RolloutConfig(max_tokens=6, max_prompt_tokens=40)
        config = Config(rollout=rollout, eval=EvalConfig(**settings))
        scorer = Scorer({"_target_": f"tests.rewards.{reward}"}, workers=1, timeout=5)
        engine = LocalEngine(policy.model, policy.end_ids(), 16, 64)
        session = make_session(config, folder, policy, engine, TaskSets([], [], tasks), scorer)
        try:
            self.returned = evaluate(session, "rl", 20)
        finally:
            scorer.close()
        self.values = json.loads((folder / "metrics.jsonl").read_text())
        self.stored = pq.read_table(folder / "rollouts" / "eval_rl.parquet").to_pylist()
        assert session.progress.evaluations == {"rl": self.returned}

    def by_task(self) -> list[list[float | None]]:
        tasks = sorted({row["task_id"] for row in self.stored})
        return [[row["reward"] for row in self.stored if row["task_id"] == task] for task in tasks]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    return lambda: capsys.readouterr().out.strip()


def test_several_samples_a_task(policy: Policy, tmp_path: Path, shown: Any) -> None:
    e = Evaluation(policy, tmp_path, "hash_of_answer", samples=5, pass_reward=0.5)
    rewards = e.by_task()
    assert [len(of_task) for of_task in rewards] == [5] * 6
    right = [[r is not None and r >= 0.5 for r in of_task] for of_task in rewards]
    assert sum(map(any, right)) > 0
    assert not all(map(all, right))
    assert list(e.values["pass_at"]) == ["1", "2", "4"]
    for k, value in e.values["pass_at"].items():
        assert value == pytest.approx(fmean(fmean(map(any, combinations(of_task, int(k)))) for of_task in right)), k
    assert (
        e.values["correct"]
        == pytest.approx(fmean(fmean(of_task) for of_task in right))
        == pytest.approx(e.values["pass_at"]["1"])
    )
    assert (
        e.values["reward"]
        == e.returned
        == pytest.approx(fmean(r for of_task in rewards for r in of_task if r is not None))
    )
    assert (e.values["tasks"], e.values["samples"]) == (6, 5)
    line = shown()
    assert (
        f"on 6 held-out tasks × 5 samples, pass@1 {e.values['pass_at']['1']:.2f} pass@4 {e.values['pass_at']['4']:.2f}, length"
        in line
    )
    assert "pass@2" not in line


def test_one_sample_a_task_is_shown_as_ever(policy: Policy, tmp_path: Path, shown: Any) -> None:
    e = Evaluation(policy, tmp_path, "hash_of_answer", pass_reward=0.5)
    v = e.values
    assert shown() == (
        f"evaluation of the model after RL: reward {v['reward']:.3f} on 6 held-out tasks, length {v['length']:.1f}, truncated {v['truncated']:.1%}"
    )
    assert v["correct"] == pytest.approx(fmean(r is not None and r >= 0.5 for (r,) in e.by_task()))
    assert "pass_at" not in v
    assert "sources" not in v


def test_a_reward_that_failed_is_never_right(policy: Policy, tmp_path: Path, shown: Any) -> None:
    e = Evaluation(policy, tmp_path, "raises_for_odd", samples=2, pass_reward=-1.0)
    assert e.values["correct"] == 0.5
    assert e.values["pass_at"] == {"1": 0.5, "2": 0.5}
    assert e.values["reward_errors"] == 6
    assert shown().endswith("! 6 rewards failed (ValueError 6)")


def test_reward_and_its_faults_by_source(policy: Policy, tmp_path: Path, shown: Any) -> None:
    e = Evaluation(policy, tmp_path, "raises_for_odd", sources=("even", "odd"))
    assert e.values["sources"] == {"even": pytest.approx(2 * e.returned), "odd": 0.0}
    assert e.values["source_faults"] == {"odd": 3}
    assert shown().endswith("! 3 rewards failed (ValueError 3; from odd 3)")


def test_what_a_model_wrote_reaches_no_terminal(shown: Any) -> None:
    """Half of a surrogate pair, an escape sequence, a name between colons: as text, and never an error."""
    Console().say("bad \ud83d \x1b[31m x[1:a:2]\r [bold]ok[/bold] é 文")
    assert shown() == r"bad \ud83d \x1b[31m x[1:a:2]\r [bold]ok[/bold] é 文"


def group(rewards: list[float]) -> Group:
    rollouts = [Rollout("t", 0, i, 0, [1]) for i in range(len(rewards))]
    for rollout, reward in zip(rollouts, rewards, strict=True):
        rollout.score(reward, {})
    return Group(0, Task("t", ({"role": "user", "content": "?"},), ""), rollouts)


def test_a_reward_of_weighted_parts_reaches_1() -> None:
    assert 0.7 + 0.2 + 0.1 < 1
    assert scores([group([0.7 + 0.2 + 0.1, 0.99])], 1.0)["correct"] == 0.5


@pytest.mark.parametrize(
    ("samples", "ks"), [(1, None), (2, ["1", "2"]), (3, ["1", "2"]), (4, ["1", "2", "4"]), (9, ["1", "2", "4", "8"])]
)
def test_which_k(samples: int, ks: list[str] | None) -> None:
    values = scores([group([1.0] + [0.0] * (samples - 1)), group([0.0] * samples)], 1.0)
    assert (list(values["pass_at"]) if "pass_at" in values else None) == ks
    if samples == 4:
        assert values["pass_at"] == {"1": 0.125, "2": 0.25, "4": 0.5}
        line = eval_line(
            values | {"name": "base", "tasks": 2, "samples": 4, "length": 1.0, "truncated": 0.0, "reward_errors": 0}
        )
        assert "reward 0.125 on 2 held-out tasks × 4 samples, pass@1 0.12 pass@4 0.50, length" in line


def made(id: int, source: str, samples: list[tuple[float, str | None]]) -> Group:
    rollouts = []
    for index, (reward, answer) in enumerate(samples):
        r = Rollout(f"t{id}", id, index, 0, [1])
        r.score(reward, {}, {"gold": reward / 2}, answer)
        rollouts.append(r)
    return Group(id, Task(f"t{id}", ({"role": "user", "content": "x"},), "a", source=source), rollouts)


def test_majority_and_measures_by_source() -> None:
    """Against a count by hand: 3 of 4 say the right answer; a tie of a right and a wrong answer; no answer at all."""

    groups = [
        made(0, "x", [(1.0, "a"), (1.0, "a"), (1.0, "a"), (0.0, "b")]),
        made(1, "x", [(1.0, "a"), (0.0, "b"), (1.0, "a"), (0.0, "b")]),
        made(2, "y", [(0.0, None)] * 4),
        made(3, "y", [(1.0, "a"), (0.0, "b"), (0.0, "b"), (0.0, "c")]),
    ]
    values = scores(groups, 1.0)
    assert values["maj_at"] == {"4": (1.0 + 0.5 + 0.0 + 0.0) / 4}
    assert values["measures"] == {"gold": pytest.approx(6 / 32)}
    assert values["sources"] == {"x": 5 / 8, "y": 1 / 8}
    assert values["by_source"]["x"]["maj_at"] == {"4": 0.75}
    means = [0.75, 0.5, 0.0, 0.25]
    error = stdev(means) / 2
    assert values["interval"] == pytest.approx([fmean(means) - 1.96 * error, fmean(means) + 1.96 * error], abs=1e-5)
    assert values["intervals"]["correct"] == values["intervals"]["pass@1"] == values["interval"]
    of_y = [0.0, 0.5]  # pass@2 of the two tasks of y: C(3, 2) of C(4, 2) pairs hold no right sample
    half = 1.959964 * stdev(of_y) / 2**0.5
    assert values["by_source"]["y"]["intervals"]["pass@2"] == pytest.approx([0.25 - half, 0.25 + half], abs=1e-5)
    assert values["by_source"]["x"]["intervals"]["maj@4"] == pytest.approx([0.75 - 0.49, 0.75 + 0.49], abs=1e-4)
    values |= {"name": "model", "tasks": 4, "samples": 4, "length": 1.0, "truncated": 0.0, "reward_errors": 0}
    assert "pass@1 0.38 pass@4 0.75 maj@4 0.38, length" in eval_line(values)
    shown = list(source_lines(values))[2]
    assert shown.startswith("y: reward 0.125 (gold 0.062), 95% -0.")
    assert ", pass@2 0.250 [-0.240, 0.740], pass@4 0.500 [" in shown


def test_two_models_are_compared_task_by_task(tmp_path: Path) -> None:
    """Against a paired t test by hand: differences of 1, 0, 0.5 and 0.5, and a task that only one model was given."""
    rewards = {"a": ([1, 1], [1, 0], [1, 0], [0, 1], [1, 1]), "b": ([0, 0], [0, 1], [0, 0], [0, 0])}
    for name, of_tasks in rewards.items():
        (tmp_path / name / "rollouts").mkdir(parents=True)
        groups = [made(i, "xxyyy"[i], [(float(r), None) for r in own]) for i, own in enumerate(of_tasks)]
        write_rollouts(tmp_path / name / "rollouts" / "eval_model.parquet", groups, [""] * len(groups), {}, ())
    found = versus.versus(tmp_path / "a", tmp_path / "b", 1.0)
    assert (found["tasks"], found["left_out"], list(found["by_source"])) == (4, 1, ["x", "y"])
    half = 3.182446 * stdev([1, 0, 0.5, 0.5]) / 2  # the 97.5 % quantile of Student's t with 3 degrees of freedom
    reward = found["all"]["reward"]
    assert reward["difference"] == 0.5
    assert reward["interval"] == pytest.approx([0.5 - half, 0.5 + half], abs=1e-5)
    assert reward["p"] == pytest.approx(0.0917, abs=1e-4)  # t = 0.5 / 0.2041 = 2.449
    assert found["all"]["pass@2"]["difference"] == 0.75
    assert found["by_source"]["y"]["reward"] == {"difference": 0.5, "interval": [0.5, 0.5], "p": 0.0}
    said = list(versus.lines(found))
    assert said[0].startswith("all tasks (4): reward +0.500 [-0.150, +1.150] p 0.092, correct +0.500")
    assert said[2].startswith("y (2): reward +0.500 [+0.500, +0.500] p 0,")


def test_greedy_beside_samples(policy: Policy, tmp_path: Path, shown: Any) -> None:
    e = Evaluation(policy, tmp_path, "hash_of_answer", greedy=True)
    stored = pq.read_table(tmp_path / "rollouts" / "greedy_rl.parquet").to_pylist()
    assert e.values["greedy"]["reward"] == pytest.approx(fmean(row["reward"] for row in stored))
    assert f"reward {e.returned:.3f}, greedy {e.values['greedy']['reward']:.3f} on 6 held-out tasks" in shown()
    again = Evaluation(policy, tmp_path / "again", "hash_of_answer", temperature=0.0)
    assert [row["token_ids"] for row in again.stored] == [row["token_ids"] for row in stored]
