"""A reward for code: the share of a task's tests that the completion's program passes in the sandbox.

    reward: {_target_: hybrid_rl.sandbox.code.passes_tests, time_limit: 2.0}

`task.answer` is JSON, for programs that read and print or for one function:

    {"tests": [{"stdin": "3\\n", "stdout": "6\\n"}, …]}
    {"function": "double", "tests": [{"args": [3], "result": 6}, …]}

Anything else there is an error of the data (ValueError), never a 0 for the model.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from hybrid_rl.sandbox import run as sandbox
from hybrid_rl.types import Task

FENCES = ("```python", "```py", "```python3")
RELATIVE, ABSOLUTE = 1e-6, 1e-9  # how far a float may be from an expected float


def passes_tests(
    completion: str,
    task: Task,
    time_limit: float = 2.0,
    memory_mib: int = 256,
    total_seconds: float = 8.0,
    format_weight: float = 0.0,
    partial: bool = True,
) -> dict[str, float]:
    """Return {"format": format_weight for a ```python block, "tests": (1 − format_weight) · share of tests passed}: 1 in all exactly when all pass.

    The last closed ```python block is the program. A test may take `time_limit` seconds of CPU (twice that by the clock) and all of them
    `total_seconds`, which must be below rollout.reward_timeout; tests that no time is left for are failed. partial=False: all or nothing.
    Raises ValueError for an answer that holds no tests, SandboxError if this machine has no sandbox.
    """
    if not 0 <= format_weight <= 1:
        raise ValueError(f"format_weight must be between 0 and 1, not {format_weight}")
    function, tests = read_tests(task)
    code = extract_code(completion)
    if code is None:
        return {"format": 0.0, "tests": 0.0}
    limits = sandbox.Limits(
        cpu_seconds=time_limit, wall_seconds=2 * time_limit, total_seconds=total_seconds, memory_mib=memory_mib
    )
    outcomes = sandbox.run(code, [given for given, _ in tests], limits, function)
    right = [
        o.ok and (o.returned and same(o.result, e) if function else same_text(o.stdout, e))
        for o, (_, e) in zip(outcomes, tests, strict=False)
    ]
    share = sum(right) / len(right)
    return {"format": format_weight, "tests": (1 - format_weight) * (share if partial else float(share == 1))}


def extract_code(completion: str) -> str | None:
    """Return the last ```python block that is closed by a line of ```; None without one."""
    code: str | None = None
    block: list[str] | None = None
    for line in completion.split("\n"):
        if block is None:
            block = [] if line.strip().lower() in FENCES else None
        elif line.strip() == "```":
            code, block = "\n".join(block), None
        else:
            block.append(line)
    return code


def read_tests(task: Task) -> tuple[str | None, list[tuple[Any, Any]]]:
    """Return the function's name (None: a program) and (input, expected) of each test.

    Raises ValueError, with the task's id, for anything else.
    """
    try:
        answer = json.loads(task.answer, parse_constant=_refuse)
    except ValueError as error:
        raise ValueError(f"task {task.id}: its answer is not JSON: {error}") from error
    function = answer.get("function") if isinstance(answer, dict) else None
    if (
        not isinstance(answer, dict)
        or set(answer) - {"function", "tests"}
        or not (function is None or isinstance(function, str))
    ):
        raise ValueError(f"task {task.id}: its answer must be {{tests: […]}} or {{function: name, tests: […]}}")
    tests = answer.get("tests")
    given, expected, kinds = ("args", "result", (list, object)) if function else ("stdin", "stdout", (str, str))
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"task {task.id}: its answer has no tests")
    for test in tests:
        if (
            not isinstance(test, dict)
            or set(test) != {given, expected}
            or not all(map(isinstance, (test[given], test[expected]), kinds))
        ):
            raise ValueError(f"task {task.id}: a test must be {{{given}, {expected}}}, not {str(test)[:200]}")
    if all(test[expected] is None or (not function and not test[expected].strip()) for test in tests):
        raise ValueError(f"task {task.id}: a program that does nothing passes all of its tests")
    return function, [(test[given], test[expected]) for test in tests]


def same_text(got: str, expected: str) -> bool:
    """Return whether two outputs are equal up to white space at the ends of lines and empty lines at the end.

    Numbers are text here: 0.10 is not 0.1.
    """
    return _lines(got) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def same(got: Any, expected: Any) -> bool:
    """Equal JSON values of equal types: True is not 1, 1.0 is not 1, "1" is not 1.

    Only an expected float is compared otherwise: with any int or float that is within 1e-6 of it, relatively, or 1e-9.
    """
    if isinstance(expected, float):
        return (
            type(got) in (int, float)
            and abs(got) < 1e308
            and math.isclose(got, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        )
    if type(got) is not type(expected):
        return False
    if isinstance(expected, list):
        return len(got) == len(expected) and all(map(same, got, expected))
    if isinstance(expected, dict):
        return got.keys() == expected.keys() and all(same(got[key], expected[key]) for key in expected)
    return got == expected


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
