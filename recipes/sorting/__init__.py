"""Sort the letters of a short string. Demonstrations show them in a random order: only the reward knows the rule."""

from __future__ import annotations

import re
import string
from random import Random

from hybrid_rl.data import TaskSets
from hybrid_rl.types import Task

ANSWER = re.compile(r"<answer>(.*?)</answer>")
SIZES = {"sft": 8000, "rl": 8000, "eval": 256}


def load_tasks(system_prompt: str, min_letters: int, max_letters: int) -> TaskSets:
    """Return disjoint sets of strings of min_letters to max_letters distinct letters, the same ones in every run."""
    random = Random(0)
    letters: dict[str, None] = {}
    while len(letters) < sum(SIZES.values()):
        count = random.randint(min_letters, max_letters)
        letters.setdefault("".join(random.sample(string.ascii_lowercase, count)))
    found, sets = iter(letters), dict[str, list[Task]]()
    for name, size in SIZES.items():
        sets[name] = [_task(f"{name}/{next(found)}", system_prompt, random) for _ in range(size)]
    return TaskSets(**sets)


def _task(id: str, system_prompt: str, random: Random) -> Task:
    text = id.partition("/")[2]
    messages = ({"role": "system", "content": system_prompt}, {"role": "user", "content": text})
    shuffled = "".join(random.sample(text, len(text)))
    return Task(id, messages, "".join(sorted(text)), demonstration=f"<answer>{shuffled}</answer>")


def in_place(completion: str, task: Task) -> tuple[float, dict[str, float]]:
    """Pay half the share of letters in their place, and half the share that is right before the first mistake.

    Anything outside the tags, or another number of letters, earns 0. Measure: exact, whether every letter is right.
    """
    found = ANSWER.fullmatch(completion)
    answer, truth = found.group(1) if found else "", task.answer
    if len(answer) != len(truth):
        return 0.0, {"exact": 0.0}
    right = [given == wanted for given, wanted in zip(answer, truth, strict=True)]
    before = right.index(False) if False in right else len(right)
    return (sum(right) + before) / (2 * len(right)), {"exact": float(all(right))}


def shuffled_truth(completion: str, task: Task) -> tuple[float, dict[str, float]]:
    """Pay what `in_place` pays for another order of the letters, drawn for each completion: the control.

    Measure: exact, of the true order.
    """
    order = "".join(Random(f"{task.id} {completion}").sample(task.answer, len(task.answer)))
    paid, _ = in_place(completion, Task(task.id, task.messages, order))
    return paid, in_place(completion, task)[1]
