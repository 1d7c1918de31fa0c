"""Environments of the form that `verifiers` documents, written here without the package: their tasks, and what their rubrics pay."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_rl.data import DataError
from hybrid_rl.data.files import load_tasks
from hybrid_rl.rewards import Verifiers
from hybrid_rl.rewards.verifiers import rows
from hybrid_rl.rollout.reward_call import Reward, Score
from hybrid_rl.types import Task

HERE = "tests.rollout.test_verifiers."


class Environment:
    """One that is told its rubric; its data sets have the columns of the package's."""

    max_turns = 1

    def __init__(self, rubric: Any):
        self.rubric = rubric

    def get_dataset(self) -> list[dict[str, Any]]:
        system = {"role": "system", "content": "Be brief."}
        return [
            {"prompt": [system, {"role": "user", "content": f"{i}+1?"}], "answer": str(i + 1), "info": {"i": i}, "task": "sum"}
            for i in range(3)
        ]  # fmt: skip

    def get_eval_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": [{"role": "user", "content": "7+1?"}], "answer": 8, "info": None, "task": ""}]


class Parser:
    def parse_answer(self, completion: list[dict[str, str]]) -> str:
        return completion[-1]["content"].strip()


async def correct(completion: Any, answer: str, parser: Parser) -> float:
    return float(parser.parse_answer(completion) == answer)


def short(completion: Any, state: dict[str, Any], most: int) -> bool:
    return len(state["completion"][0]["content"]) <= most and completion is state["completion"]


def place(**given: Any) -> int:
    return given["info"].get("i", -1) if given["prompt"][-1]["role"] == "user" and given["task"] == "sum" else -2


def of_group(completions: list[Any]) -> list[float]:
    return [0.0] * len(completions)


def load_environment(size: int = 3) -> Environment:
    """One rubric with attributes, as newer versions have, and one with methods, as older ones have, in a group."""
    new = SimpleNamespace(funcs=[correct, place], weights=[1.0, 0.0], parser=Parser(), class_objects={})
    old = SimpleNamespace(
        get_reward_funcs=lambda: [short], get_reward_weights=lambda: [0.5], class_objects={"most": size}
    )
    return Environment(SimpleNamespace(rubrics=[new, old]))


def load_grouped() -> Environment:
    return Environment(SimpleNamespace(funcs=[of_group], weights=[1.0]))


def load_free() -> Environment:
    return Environment(SimpleNamespace(funcs=[place], weights=[0.0]))


def load_turns() -> SimpleNamespace:
    return SimpleNamespace(get_dataset=None, rubric=None, max_turns=-1)


def load_nothing() -> None:
    return None


def test_its_tasks_are_rows() -> None:
    name = HERE + "load_environment"
    sets = load_tasks(rl={"rows": rows(name), "name": "sums"}, eval={"rows": rows(name, "eval")})
    assert [(len(t.messages), t.answer, t.source, t.columns) for t in sets.rl[:2]] == [
        (2, "1", "sums", {"info": {"i": 0}, "task": "sum"}),
        (2, "2", "sums", {"info": {"i": 1}, "task": "sum"}),
    ]
    assert [(t.answer, t.columns) for t in sets.eval] == [("8", {})]


def test_its_rubric_pays() -> None:
    reward = Reward(
        {"_target_": "hybrid_rl.rewards.Verifiers", "function": HERE + "load_environment", "arguments": {"size": 4}}
    )
    (task,) = [
        t
        for t in load_tasks(rl=rows(HERE + "load_environment"), eval=rows(HERE + "load_environment", "eval")).rl
        if t.answer == "3"
    ]
    found = reward.score([" 3 ", "12345", "3"], [task] * 3)
    assert found == [
        Score(1.5, {"correct": 1.0, "short": 0.5}, {"place": 2.0}),
        Score(0.0, {"correct": 0.0, "short": 0.0}, {"place": 2.0}),
        Score(1.5, {"correct": 1.0, "short": 0.5}, {"place": 2.0}),
    ]
    bare = Task("t", task.messages, "3", columns={"info": '{"i": 9}', "task": "sum"})  # info as its JSON text
    assert asyncio.run(Verifiers(HERE + "load_environment")("3", bare))[1] == {"place": 9.0}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("load_grouped", "of_group scores a whole group .completions., which is not supported"),
        ("load_free", "its rubric pays nothing; every weight is 0"),
        ("load_turns", r"its environment takes several turns .max_turns=-1.; only single turns can be used"),
        ("load_nothing", "returned NoneType, which has no get_dataset: no environment"),
    ],
)
def test_what_cannot_be_used_is_one_line(name: str, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        Verifiers(HERE + name)
