"""Rewards for numbers and formulas."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from hybrid_rl.rewards.text import Scored, find_answer
from hybrid_rl.types import Task

NUMBER = re.compile(
    r"(?:(?<![\w)])[-+])?"  # 3-4 holds 3 and 4
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?(?:\s*/\s*\d+)?"
)
MINUS = "\u2212"  # the sign of typeset formulas
LONGEST = 400  # characters of a number


def last_number(text: str) -> Fraction | None:
    """Return the last number in a text, exactly: 1,234.5 or 3/4 or 2e-3; None without one."""
    for found in reversed(NUMBER.findall(text.replace(MINUS, "-"))):
        above, _, below = "".join(found.split()).replace(",", "").partition("/")
        if len(found) <= LONGEST and (not below or int(below)):
            return Fraction(above) / int(below or 1)
    return None


def numeric(completion: str, task: Task, within: str | None = None, tolerance: float = 0.0) -> Scored:
    """Pay 1 if the last number of the answer is that of task.answer, up to `tolerance` (relative).

    within: see `find_answer`. Raises ValueError if task.answer holds no number. Digits group by commas; a % or unit beside a number is ignored.
    """
    truth = last_number(task.answer)
    if truth is None:
        raise ValueError(f"task {task.id}: its answer {task.answer[:60]!r} holds no number")
    answer = last_number(find_answer(completion, within) or "")
    right = answer is not None and abs(answer - truth) <= Fraction(tolerance) * abs(truth)
    return float(right), {"answer": None if answer is None else str(answer)}


class MathVerify:
    """Pay 1 if `math-verify` (pip install 'hybrid_rl[math]') finds the completion's last formula equal to task.answer.

    seconds: for parsing, and for comparing. A parser that takes longer, or fails, costs this reward and no other.
    """

    def __init__(self, seconds: int = 3):
        try:
            import math_verify
        except ImportError as error:
            raise ImportError(
                "MathVerify needs math-verify, which is not installed; pip install -e '.[math]'"
            ) from error
        self.library: Any = math_verify
        self.seconds = seconds
        self._truth: tuple[str, Any] = "", None

    def __call__(self, completion: str, task: Task) -> Scored:
        truth = self._parsed_truth(task)
        answer = self.library.parse(completion, parsing_timeout=self.seconds, raise_on_error=True)
        right = bool(answer) and self.library.verify(truth, answer, timeout_seconds=self.seconds, raise_on_error=True)
        return float(right), {"answer": str(answer[-1]) if answer else None}

    def _parsed_truth(self, task: Task) -> Any:
        if self._truth[0] != task.answer:  # a group's rollouts share it
            text = task.answer if "\\boxed" in task.answer or "$" in task.answer else f"\\boxed{{{task.answer}}}"
            parsed = self.library.parse(text, parsing_timeout=self.seconds, raise_on_error=True)
            if not parsed:
                raise ValueError(f"task {task.id}: math-verify finds no formula in its answer {task.answer[:60]!r}")
            self._truth = task.answer, parsed
        return self._truth[1]
