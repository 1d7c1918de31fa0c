"""Write a small Python function; what pays are tests, which a sandbox runs. Also the tasks of MBPP, if you have them."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from hybrid_rl.data.rows import read_rows
from hybrid_rl.data.tasks import DataError

TESTS = 5  # of a task
# what a function of a list of whole numbers does, with a number k, and the same in Python
LISTS: dict[str, Callable[[list[int], int], Any]] = {
    "the sum of the numbers that {k} divides": lambda numbers, k: sum(n for n in numbers if n % k == 0),
    "how many numbers are greater than {k}": lambda numbers, k: sum(n > k for n in numbers),
    "the numbers, each multiplied by {k}": lambda numbers, k: [n * k for n in numbers],
    "the numbers without those that are {k}": lambda numbers, k: [n for n in numbers if n != k],
    "the first {k} numbers, in reverse order": lambda numbers, k: numbers[:k][::-1],
    "every {k}th number, beginning with the first": lambda numbers, k: numbers[::k],
    "the largest number minus {k}": lambda numbers, k: max(numbers) - k,
    "the numbers in ascending order, each raised by {k}": lambda numbers, k: sorted(n + k for n in numbers),
    "whether {k} is one of the numbers": lambda numbers, k: k in numbers,
    "the place of the smallest number (from 0, the first if there are several) plus {k}": lambda numbers, k: (
        numbers.index(min(numbers)) + k
    ),
}
# what a function of a text does
TEXTS: dict[str, Callable[[str, int], Any]] = {
    "the text without its first {k} characters": lambda text, k: text[k:],
    "the number of characters of the text plus {k}": lambda text, k: len(text) + k,
    "the text, {k} times, with a blank between": lambda text, k: " ".join([text] * k),
    "every {k}th character of the text, beginning with the first": lambda text, k: text[::k],
    "the words of the text in alphabetical order, at most {k} of them": lambda text, k: sorted(text.split())[:k],
}
WORDS = """
red green blue one seven stone river a cloud of windy salt bread tea the
"""
PROMPT = "Write a Python function `solve({name})` that returns {what}. Put it in a ```python block."
HELD_OUT = (3, 6)  # tasks with these k are held out


def rows(held_out: bool, largest: int = 9) -> list[dict[str, Any]]:
    """Return a task for each thing to do and each k from 2 to `largest`; a k is either held out or not."""
    found = []
    for kinds, name in ((LISTS, "numbers"), (TEXTS, "text")):
        for what, function in kinds.items():
            for k in range(2, largest + 1):
                if (k in HELD_OUT) == held_out:
                    prompt = PROMPT.format(name=name, what=what.format(k=k))
                    found.append({"prompt": prompt, "answer": _answer(function, name, k), "source": name})
    Random(0).shuffle(found)
    return found


def _answer(function: Callable[[Any, int], Any], name: str, k: int) -> str:
    random, tests = Random(f"{name} {k}"), []
    for _ in range(TESTS):
        size = random.randint(4, 9)
        given: Any = [random.randint(-9, 20) for _ in range(size)]
        if name == "text":
            given = " ".join(random.choice(WORDS.split()) for _ in range(size))
        tests.append({"args": [given], "result": function(given, k)})
    return json.dumps({"function": "solve", "tests": tests})


def mbpp(path: str) -> list[dict[str, Any]]:
    """Return the tasks of a file of MBPP (keys text or prompt, code, test_list) whose tests compare literals.

    A test `assert f(1, [2]) == 3` is read and never run. A task with another kind of test is left out. Raises DataError
    if none is left.
    """
    found = []
    for _, row, _ in read_rows("data.rl.rows.path", Path(path), ["text", "prompt", "test_list"], False):
        lines = row.get("test_list") or []
        read = [_test(line) for line in lines]
        if len({name for name, _ in read}) == 1 and None not in read[0]:
            shown = "\n".join(lines)
            prompt = f"{row.get('text') or row['prompt']}\nPut it in a ```python block. It must pass:\n{shown}"
            found.append({"prompt": prompt, "answer": {"function": read[0][0], "tests": [test for _, test in read]}})
    if not found:
        raise DataError(f"data.rl.rows.path={path}: has no task whose tests are like: assert f(1, [2]) == 3")
    return found


def _test(line: str) -> tuple[str | None, dict[str, Any] | None]:
    """Return the function's name and the test of a line; (None, None) for any other form."""
    try:
        match ast.parse(line.strip()).body:
            case [
                ast.Assert(
                    test=ast.Compare(left=ast.Call(ast.Name(name), given, []), ops=[ast.Eq()], comparators=[wanted])
                )
            ]:
                test = {"args": [ast.literal_eval(node) for node in given], "result": ast.literal_eval(wanted)}
                if json.loads(json.dumps(test)) == test:  # tuples and sets are no JSON
                    return name, test
    except (SyntaxError, ValueError, TypeError):
        pass
    return None, None
