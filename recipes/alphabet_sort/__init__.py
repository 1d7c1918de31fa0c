"""Keep letters in alphabetical order while more of them come, turn by turn. Only the reward knows the rule."""

from __future__ import annotations

import string
from random import Random

from hybrid_rl.recipes.sorting import in_place

from hybrid_rl.data import TaskSets
from hybrid_rl.environments import Done, Reply
from hybrid_rl.types import Task

SIZES = {"sft": 8000, "rl": 4000, "eval": 256}


class Sorting:
    """Give more letters until all are given; each answer must hold all letters so far, sorted.

    A turn pays its share of the reward as the recipe sorting pays an answer. Measure: exact, the share of turns in which
    every letter is right.
    """

    def reset(self, task: Task) -> None:
        self.given = task.columns["given"]
        self.turn = 0

    def step(self, completion: str) -> Reply | Done:
        self.turn += 1
        letters = "".join(sorted("".join(self.given[: self.turn])))
        reward, measures = in_place(completion, Task("turn", ({"role": "user", "content": letters},), letters))
        share = len(self.given)
        exact = {"exact": measures["exact"] / share}
        if self.turn == share:
            return Done(reward / share, exact)
        return Reply(self.given[self.turn], (reward / share, exact))


def load_tasks(system_prompt: str, turns: int) -> TaskSets:
    """Return disjoint sets of games of `turns` turns, each with 2 new letters, the same ones in every run.

    Demonstrations answer one turn of a game, and show its letters in a random order, as do the answers before.
    """
    random, sets = Random(0), dict[str, list[Task]]()
    games: dict[tuple[str, ...], None] = {}
    while len(games) < sum(SIZES.values()):
        letters = random.sample(string.ascii_lowercase, 2 * turns)
        games.setdefault(tuple("".join(letters[2 * i : 2 * i + 2]) for i in range(turns)))
    found = iter(games)
    for name, size in SIZES.items():
        sets[name] = [_task(next(found), system_prompt, random if name == "sft" else None) for _ in range(size)]
    return TaskSets(**sets)


def _task(given: tuple[str, ...], system_prompt: str, random: Random | None) -> Task:
    messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": given[0]}]
    turns = 1 if random is None else random.randint(1, len(given))
    for turn in range(1, turns):
        assert random is not None
        messages += [{"role": "assistant", "content": _shuffled(given[:turn], random)}]
        messages += [{"role": "user", "content": given[turn]}]
    return Task(
        "/".join(given),
        tuple(messages),
        "".join(sorted("".join(given))),
        demonstration=None if random is None else _shuffled(given[:turns], random),
        columns={"given": list(given)},
    )


def _shuffled(given: tuple[str, ...], random: Random) -> str:
    letters = "".join(given)
    return f"<answer>{''.join(random.sample(letters, len(letters)))}</answer>"
