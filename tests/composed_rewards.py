"""Rewards that are composed, batched, async or of TRL's form, for tests/rollout/test_reward_call.py."""

import asyncio
import os
import time
from collections.abc import Sequence

from hybrid_rl.types import Task


def length(completion: str, task: Task) -> float:
    return float(len(completion))


def measured(completion: str, task: Task):
    return {"a": 1.0, "b": 2.0}, {"gold": float("gold" in completion), "answer": completion[:1] or None}


def nothing(completion: str, task: Task) -> None:
    return None


def fails(completion: str, task: Task) -> float:
    raise ValueError("no")


def batched(completions: Sequence[str], tasks: Sequence[Task]):
    """How many came together; one kind of completion fails, hangs or ends the process."""
    if "raise" in completions:
        raise ValueError("one is bad")
    if "hang" in completions:
        time.sleep(60)
    if "die" in completions:
        os._exit(3)
    if "short" in completions:
        return [1.0] * (len(completions) - 1)
    return [{"size": 0.0, "length": float(len(c))} for c in completions]


async def together(completion: str, task: Task, seconds: float = 0.3) -> float:
    await asyncio.sleep(seconds)
    return float(len(completion))


def trl_text(prompts, completions, answer, **columns):
    """As written for TRL: lists by name; None where it does not apply."""
    hints = columns.get("hint", [None] * len(prompts))
    return [
        None if c == "skip" else float(c == a) + 10 * (h or 0)
        for c, a, h in zip(completions, answer, hints, strict=True)
    ]


def trl_chat(completions, **kwargs):
    assert set(kwargs) >= {"prompts", "answer"}
    return [float(len(c[0]["content"])) for c in completions]


def trl_few(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


class Counting:
    """Made once in a worker; pays how often it was called."""

    def __init__(self, start: int = 0):
        self.calls = start

    def __call__(self, completion: str, task: Task) -> float:
        self.calls += 1
        return float(self.calls)
