"""What a run does when an engine dies, when it compares weights, and what it leaves an engine of a GPU."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from hybrid_rl import stages
from hybrid_rl.config import Config, EngineConfig
from hybrid_rl.engine.base import Completion, EngineDied, EngineError
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.engine.make import memory_fraction
from hybrid_rl.policy.model import Policy
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.rl import train_rl
from hybrid_rl.run_folder.progress import Progress
from hybrid_rl.session import build_engine
from tests.ranks import on_ranks
from tests.test_rl import session

GIB = 2**30


def test_the_engine_gets_what_the_trainer_leaves() -> None:
    assert memory_fraction(100 * GIB, 0) == pytest.approx(0.88)
    assert memory_fraction(100 * GIB, 30 * GIB) == pytest.approx(0.58)
    assert memory_fraction(24 * GIB, 6 * GIB) == pytest.approx(0.63)
    with pytest.raises(EngineError, match=r"1\.6 GiB of the 20\.0 GiB that are free.*16\.0 GiB.*policy\.offload"):
        memory_fraction(20 * GIB, 16 * GIB)


def test_tensor_parallelism_must_fit_the_ranks_and_the_engine(policy: Policy, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="is local; set it to 1"):
        build_engine(Config(engine=EngineConfig(tensor_parallel=2)), policy)


@pytest.mark.parametrize("verify", [False, True])
def test_verify_is_for_the_handovers_of_evaluations_too(monkeypatch: pytest.MonkeyPatch, verify: bool) -> None:
    asked: list[bool] = []
    handover = SimpleNamespace(to_engine=lambda version, verify: asked.append(verify), to_trainer=lambda: None)
    stage = SimpleNamespace(config=Config(), handover=handover, progress=Progress())
    stage.config.handover.verify = verify
    monkeypatch.setattr(stages, "evaluate", lambda *_: None)
    stages._evaluate(stage, "base")
    assert asked == [verify]


class Mortal(LocalEngine):
    """Samples like the real one from a copy of the weights, and dies at the calls of `generate` that it is told to, some completions in."""

    def __init__(self, policy: Policy, copy: Policy, dies: dict[int, int]):
        super().__init__(copy.model, policy.end_ids(), 16, 64)
        self.dies, self.calls, self.dead = dies, 0, False

    def generate(self, requests, sampling) -> Iterator[Completion]:
        self.calls += 1
        return self._until(self.calls, super().generate(requests, sampling))

    def _until(self, call: int, stream: Iterator[Completion]) -> Iterator[Completion]:
        for count, completion in enumerate(stream):
            if count == self.dies.get(call):
                self.abort()
                self.dead = True
                raise EngineDied("the engine's process has ended with code -9\nits log")
            yield completion

    def update_weights(self, buckets, version):
        if self.dead:
            raise EngineDied("the engine's process has ended with code -9\nits log")
        super().update_weights(buckets, version)

    def restart(self) -> None:
        if self.dead:
            self.dead, self.version = False, -1
            self._asleep.clear()
            with torch.no_grad():
                for parameter in self.model.parameters():  # as if the model's folder held them
                    parameter.fill_(float("nan"))


def trained(
    ranks: Ranks, folder: Path, where: Path, dies: dict[int, dict[int, int]], restarts: int = 2
) -> dict[str, Any]:
    """Two steps of RL with engines that die at the given calls of each rank."""
    policy, copy = Policy.load(folder, torch.device("cpu"), None, ranks), Policy.load(folder, torch.device("cpu"))
    s = session(policy, where, "hash_of_answer", Mortal(policy, copy, dies.get(ranks.rank, {})), steps=2, eval_every=1)
    s.handover.allowed_restarts = restarts
    result: dict[str, Any] = {"error": ""}
    try:
        train_rl(s)
    except EngineError as error:
        result["error"] = str(error)
    finally:
        s.scorer.close()
    if ranks.main:
        result["rollouts"] = {p.name: pq.read_table(p).to_pylist() for p in sorted((where / "rollouts").iterdir())}
        result["steps"] = [line for line in map(json.loads, (where / "metrics.jsonl").open()) if line["stage"] == "rl"]
    return result | {"restarts": s.handover.restarts}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "dies"),
    [
        (1, {0: {1: 2}}),  # rank → call of generate → completions before the end
        (1, {0: {1: 0, 2: 3}}),
        (2, {1: {1: 1}}),  # one rank of two: the other one goes along
        (2, {0: {1: 1}, 1: {1: 0}}),  # both in one call are one restart
    ],
    ids=str,
)
def test_a_run_goes_on_where_an_engine_died(tiny_folder: Path, tmp_path: Path, world: int, dies: dict) -> None:
    """Every token, version and reward is that of a run that nothing disturbed, and it is told which step it was."""
    whole, broken = (
        on_ranks(world, trained, tiny_folder, made(tmp_path / name), died)[0]
        for name, died in (("whole", {}), ("broken", dies))
    )
    assert whole["error"] == broken["error"] == ""
    exact = ("task_id", "group_id", "index", "token_ids", "versions", "reward", "trained")
    rows = [
        {name: [{key: row[key] for key in exact} for row in table] for name, table in r["rollouts"].items()}
        for r in (broken, whole)
    ]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 3
    for ours, theirs in zip(broken["steps"], whole["steps"], strict=True):
        assert ours["mismatch_kl"] < 1e-6
        assert (ours["reward"], ours["entropy"], ours["grad_norm"]) == pytest.approx(
            (theirs["reward"], theirs["entropy"], theirs["grad_norm"]), rel=1e-4
        )
    assert [step["engine_restarts"] for step in whole["steps"]] == [0, 0]
    assert (
        sum(step["engine_restarts"] for step in broken["steps"])
        == broken["restarts"]
        == max(len(calls) for calls in dies.values())
    )


def made(folder: Path) -> Path:
    (folder / "rollouts").mkdir(parents=True)
    return folder


@pytest.mark.parametrize("world", [1, 2])
def test_restarts_have_an_end(tiny_folder: Path, tmp_path: Path, world: int) -> None:
    dies = {world - 1: dict.fromkeys(range(1, 9), 0)}
    for result in on_ranks(world, trained, tiny_folder, made(tmp_path / "run"), dies, 2):
        assert result["restarts"] == 2
        assert result["error"].startswith(
            "the engine died 3 times, and engine.restarts=2; the engine's process has ended with code -9"
        )


def test_the_line_of_a_step_tells_of_restarts(tiny_folder: Path, tmp_path: Path, capsys) -> None:
    trained(Ranks(), tiny_folder, made(tmp_path / "run"), {0: {1: 1}})
    lines = capsys.readouterr().out.splitlines()
    assert "engine restarted (1 of 2 times): the engine's process has ended with code -9" in lines
    assert next(line for line in lines if line.startswith("step ")).endswith("! 1 × engine restarted")
