"""Reach a number with given numbers, each used once, by +, -, * and /."""

from __future__ import annotations

import ast
import operator
from fractions import Fraction
from hashlib import sha256
from random import Random
from typing import Any

from hybrid_rl.rewards.text import find_answer
from hybrid_rl.types import Task

OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
LONGEST = 200  # characters of an expression
EXAMPLE = (
    {"role": "user", "content": "Make 14 from 3, 5, 6."},
    {"role": "assistant", "content": "3 + 5 + 6 = 14"},
)
HELD_OUT = 0.1  # share of all sets of numbers


def rows(numbers: list[int], largest: int, count: int, held_out: bool) -> list[dict[str, Any]]:
    """Return `count` different tasks with as many numbers, from 1 to `largest`, as one of `numbers` says.

    Each has a solution. Its source is the number of numbers. A set of numbers is either held out or not, whatever its
    goals are. Raises ValueError if there are fewer tasks than `count`.
    """
    random, found = Random(0), dict[str, dict[str, Any]]()
    for _ in range(100 * count):
        size = random.choice(numbers)
        given = [random.randint(1, largest) for _ in range(size)]
        goal = _goal(given, random)
        if goal is None or (_place(given) < HELD_OUT) != held_out:
            continue
        prompt = f"Make {goal} from {', '.join(map(str, given))}."
        messages = [*EXAMPLE, {"role": "user", "content": prompt}]
        found[prompt] = {"prompt": messages, "answer": goal, "numbers": given, "source": f"{size} numbers"}
        if len(found) == count:
            return list(found.values())
    raise ValueError(f"there are fewer than {count} tasks of {numbers} numbers up to {largest}; ask for fewer")


def _goal(given: list[int], random: Random) -> int | None:
    """Return what a random expression of all numbers gives; None unless that is a whole number from 1 to 99."""
    value = Fraction(given[0])
    for number in given[1:]:
        operation = random.choice(list(OPERATORS.values()))
        value = operation(value, Fraction(number))
    return int(value) if value.denominator == 1 and 1 <= value <= 99 else None


def _place(given: list[int]) -> float:
    return int.from_bytes(sha256(str(sorted(given)).encode()).digest()[:8], "big") / 2**64


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """Return the exact value of an expression and the numbers in it, sorted; None if it is no expression.

    Allowed are whole numbers, + - * / between two terms, and brackets. The text is parsed and never run.
    """
    if len(expression) > LONGEST:
        return None
    used: list[int] = []

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
                used.append(number)
                return Fraction(number)
            case ast.BinOp(left=left, op=kind, right=right) if type(kind) in OPERATORS:
                return OPERATORS[type(kind)](value(left), value(right))
        raise ValueError

    try:
        result = value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return result, sorted(used)


def reaches(completion: str, task: Task, within: str | None = None, form: float = 0.2) -> tuple[Any, dict[str, float]]:
    """Pay `form` for an expression that uses each number of task.columns["numbers"] once, and the rest for the goal.

    The expression is the last line of the answer, up to a "=". within: where the answer stands, as in
    hybrid_rl.rewards.text.find_answer. Measure: near, 1 / (1 + distance from the goal).
    """
    line = (find_answer(completion, within) or "").strip().rpartition("\n")[2]
    found = evaluate(line.partition("=")[0])
    if found is None or found[1] != sorted(task.columns["numbers"]):
        return {"form": 0.0, "goal": 0.0}, {"near": 0.0}
    distance = abs(found[0] - int(task.answer))
    return {"form": form, "goal": (1 - form) * (distance == 0)}, {"near": float(1 / (1 + distance))}
