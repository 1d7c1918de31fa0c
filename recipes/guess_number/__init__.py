"""Find a number by asking: a conversation of several turns. Demonstrations guess at random; only the reward knows halving."""

from __future__ import annotations

import math
import re
from random import Random

from hybrid_rl.data import TaskSets
from hybrid_rl.environments import Done, Reply
from hybrid_rl.types import Task

HIGHER, LOWER = "higher", "lower"
COPIES = {"rl": 8, "eval": 8}  # tasks of each number
DEMONSTRATIONS = 8000


class Guess:
    """Say whether the number is higher or lower until it is found. Anything but a number from 1 to `most` ends the game.

    Half of the reward is for finding it, half for information: each turn is paid log(before / after) / log(most), for the
    counts of numbers that may still be it, which adds up to 1 once a single one is left.
    """

    def __init__(self, most: int):
        self.most = most

    def reset(self, task: Task) -> None:
        self.number, self.low, self.high = int(task.answer), 1, self.most

    def step(self, completion: str) -> Reply | Done:
        if not re.fullmatch("[1-9][0-9]{0,3}", completion) or int(completion) > self.most:
            return Done({"found": 0.0})
        guess, before = int(completion), self.high - self.low + 1
        if guess == self.number:
            return Done({"found": 0.5, "information": self._information(before, 1)})
        said = hint(guess, self.number)
        if said == HIGHER:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        return Reply(said, {"information": self._information(before, self.high - self.low + 1)})

    def _information(self, before: int, after: int) -> float:
        return math.log(before / after) / math.log(self.most) / 2


def hint(guess: int, number: int) -> str:
    return HIGHER if number > guess else LOWER


def load_tasks(system_prompt: str, most: int, turns: int) -> TaskSets:
    """Return games with the numbers from 1 to `most`, and for SFT the next guess, at random, after up to turns − 1 others.

    The same numbers are practised and evaluated: what is learned is a strategy, and there is nothing else to hold out.
    """
    messages = ({"role": "user", "content": system_prompt},)
    games = {
        name: [
            Task(f"{name}/{number}/{copy}", messages, str(number))
            for copy in range(copies)
            for number in range(1, most + 1)
        ]
        for name, copies in COPIES.items()
    }
    random = Random(0)
    return TaskSets(sft=[_demonstration(i, messages, most, turns, random) for i in range(DEMONSTRATIONS)], **games)


def _demonstration(i: int, messages: tuple[dict[str, str], ...], most: int, turns: int, random: Random) -> Task:
    number, said = random.randint(1, most), list(messages)
    low, high = 1, most
    for guess in (random.randint(low, high) for _ in range(random.randrange(turns))):
        if guess == number:
            break
        said += [{"role": "assistant", "content": str(guess)}, {"role": "user", "content": hint(guess, number)}]
        low, high = (guess + 1, high) if guess < number else (low, guess - 1)
    return Task(f"sft/{i}", tuple(said), str(number), demonstration=str(random.randint(low, high)))
