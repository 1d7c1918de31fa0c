"""The recipe alphabet_sort: what each turn pays, and what demonstrations know."""

from __future__ import annotations

from statistics import fmean

import pytest
from hybrid_rl.recipes.alphabet_sort import Sorting, load_tasks

from hybrid_rl.environments import Done
from hybrid_rl.types import Task


def play(*answers: str) -> tuple[float, float, list[str]]:
    """Return what a game with dw, bq and ka is paid, how exact it was, and the replies."""
    game, paid, exact, said = Sorting(), 0.0, 0.0, []
    game.reset(Task("t", ({"role": "user", "content": "dw"},), "abdkqw", columns={"given": ["dw", "bq", "ka"]}))
    for answer in answers:
        reply = game.step(answer)
        reward, measures = (reply.reward, reply.measures) if isinstance(reply, Done) else reply.reward
        paid, exact = paid + reward, exact + measures["exact"]
        said.append("done" if isinstance(reply, Done) else reply.messages)
    return pytest.approx(paid), pytest.approx(exact), said


def test_each_turn_pays_its_third():
    right = [f"<answer>{letters}</answer>" for letters in ("dw", "bdqw", "abdkqw")]
    assert play(*right) == (1.0, 1.0, ["bq", "ka", "done"])
    assert play(right[0], "<answer>bdwq</answer>", right[2]) == (2 / 3 + (2 + 2) / 8 / 3, 2 / 3, ["bq", "ka", "done"])
    assert play(right[0], right[0], "abdkqw") == (1 / 3, 1 / 3, ["bq", "ka", "done"])


def test_sets_are_disjoint_and_demonstrations_know_no_rule():
    sets = load_tasks("s", 3)
    assert [len(tasks) for tasks in (sets.sft, sets.rl, sets.eval)] == [8000, 4000, 256]
    assert len({task.id for tasks in (sets.sft, sets.rl, sets.eval) for task in tasks}) == 12256
    right = []
    for task in sets.sft:
        given = [m["content"] for m in task.messages if m["role"] == "user"]
        for turn, said in enumerate(
            [m["content"] for m in task.messages if m["role"] == "assistant"] + [task.demonstration], 1
        ):
            letters = said.removeprefix("<answer>").removesuffix("</answer>")
            assert sorted(letters) == sorted("".join(given[:turn]))
            right.append((turn, letters == "".join(sorted(letters))))
    for turn, chance in ((1, 1 / 2), (2, 1 / 24), (3, 1 / 720)):
        assert fmean(found for t, found in right if t == turn) == pytest.approx(chance, abs=0.02)
    assert load_tasks("s", 3).digests() == sets.digests()
