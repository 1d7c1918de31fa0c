"""Reward functions that misbehave in every way, for the tests; loaded by name in worker processes."""

import os
import sys
import time

from hybrid_rl.types import Task


def length(completion: str, task: Task, scale: float = 1.0) -> float:
    return scale * len(completion)


def parts(completion: str, task: Task) -> dict[str, float]:
    return {"format": 0.25, "truth": 0.5}


def of_no_task(completion: str) -> float:
    return float(len(completion))


def with_a_limit(completion: str, task: Task, *, limit: int, scale: float = 1.0) -> float:
    return scale * min(limit, len(completion))


class Odd(Exception):
    """Cannot be unpickled: its arguments are not those of its base."""

    def __init__(self, one: str, two: str):
        super().__init__(one)
        self.two = two


def by_order(completion: str, task: Task) -> float:
    """The completion names what is to happen."""
    if completion == "raise":
        raise KeyError("no such answer")
    if completion == "hang":
        time.sleep(600)
    if completion == "die":
        os._exit(7)
    if completion == "nan":
        return float("nan")
    if completion == "exit":
        sys.exit(3)
    if completion == "odd":
        raise Odd("first", "second")
    if completion == "own timeout":
        raise TimeoutError("the checker's host does not answer")
    if completion == "inf":
        return {"a": float("inf"), "b": float("-inf")}  # type: ignore[return-value]
    if completion == "huge":
        return -(10**400)
    if completion == "nothing":
        return None  # type: ignore[return-value]
    if completion == "lambda":
        return lambda: 1.0  # type: ignore[return-value]
    if completion == "text":
        return "1.0"  # type: ignore[return-value]
    return 1.0


def hash_of_answer(completion: str, task: Task) -> float:
    """Deterministic and different for nearly every completion."""
    return (sum(ord(c) * (i + 1) for i, c in enumerate(completion)) % 97) / 97


def slow(completion: str, task: Task) -> float:
    time.sleep(0.5)
    return float(len(completion))


def constant(completion: str, task: Task) -> float:
    return 0.5


def level(completion: str, task: Task) -> float:
    """What a column of the task says, and a little more."""
    return task.columns["info"]["level"] + len(completion)


def always_raises(completion: str, task: Task) -> float:
    raise RuntimeError("the checker is down")


def not_loadable(scale: float) -> float:
    raise ImportError("never reached")


def silent_for_short(completion: str, task: Task) -> float:
    """No signal for tasks with an even answer."""
    return 0.5 if int(task.answer) % 2 == 0 else hash_of_answer(completion, task)


def raises_for_odd(completion: str, task: Task) -> float:
    if int(task.answer) % 2:
        raise ValueError("odd")
    return hash_of_answer(completion, task)


def fails_every(completion: str, task: Task, n: int) -> float:
    """A timeout of its own for each task whose answer n divides."""
    if int(task.answer) % n == 0:
        raise TimeoutError("the checker's host does not answer")
    return hash_of_answer(completion, task)


def by_hash(completion: str, task: Task) -> float:
    """Python's own hash of a text, another one in every process unless it is told otherwise."""
    return hash(completion) % 97 / 97


def hangs_on_rank_1(completion: str, task: Task) -> float:
    if os.environ.get("RANK") == "1":
        time.sleep(1000)
    return hash_of_answer(completion, task)
