"""Environments that behave, and misbehave in every way, for the tests; loaded by name in worker processes."""

from __future__ import annotations

import asyncio
import os
import random
import time

from hybrid_rl.environments import Done, Reply
from hybrid_rl.types import Task


class Guess:
    """Say whether the number is higher or lower until it is found; each guess costs."""

    def __init__(self, cost: float = 0.0):
        self.cost = cost

    def reset(self, task: Task) -> None:
        self.number = int(task.answer)

    def step(self, completion: str) -> Reply | Done:
        if not completion.strip().isdecimal():
            return Done(0.0)
        guess = int(completion)
        if guess == self.number:
            return Done(1.0)
        return Reply("higher" if guess < self.number else "lower", {"cost": -self.cost})


class Slow(Guess):
    """The same, async."""

    async def step(self, completion: str) -> Reply | Done:  # type: ignore[override]
        await asyncio.sleep(0.05)
        return Guess.step(self, completion)


class Echo:
    """Reply with the number of answers so far, for ever, and pay 1 for each."""

    def reset(self, task: Task) -> None:
        self.turns = 0

    def step(self, completion: str) -> Reply:
        self.turns += 1
        return Reply(f"answer {self.turns} of {completion[:3]}", 1)


class Moody(Echo):
    """End the conversation after an answer of odd length."""

    def step(self, completion: str) -> Reply | Done:  # type: ignore[override]
        return Done(1) if len(completion) % 2 else super().step(completion)


class Odd(Echo):
    """The completion names what is to happen."""

    def step(self, completion: str):  # type: ignore[override]
        if completion == "raise":
            raise KeyError("no such answer")
        if completion == "hang":
            time.sleep(600)
        if completion == "die":
            os._exit(7)
        if completion == "number":
            return 1.0
        if completion == "assistant":
            return {"role": "assistant", "content": "I speak for you"}
        if completion == "flood":
            return "x" * 100_000
        if completion == "nan":
            return Done(float("nan"))
        if completion == "random":
            return str(random.random())
        return super().step(completion)


class NoStep:
    def reset(self, task: Task) -> None:
        pass


class Counter:
    """Gymnasium's interface: count up to the seed."""

    def reset(self, seed=None, options=None):
        self.left = seed
        return f"{self.left} to go", {}

    def step(self, action):
        self.left -= action == "next"
        return f"{self.left} to go", 0.5, self.left == 0, False, {}


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


async def divide(a: float, b: float) -> float:
    """Divide a number by another.

    Args:
        a: the dividend
        b: the divisor
    """
    return a / b


def undescribed(a):
    return a


def last_word(completion: str, task: Task) -> float:
    """Pay if the last answer is right."""
    return float(completion.split()[-1:] == [task.answer])
