"""The recipe guess_number: what is paid, what demonstrations know, and a small run with its resume."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hybrid_rl.recipes.guess_number import Guess, load_tasks

from hybrid_rl.environments import Done
from hybrid_rl.run_folder.rollouts import read_rollouts
from hybrid_rl.types import Task
from tests.test_run import command


def play(number: int, *guesses: str) -> tuple[float, list[str]]:
    """Return what a game is paid, and the replies."""
    game, paid, said = Guess(15), 0.0, []
    game.reset(Task("t", ({"role": "user", "content": "?"},), str(number)))
    for guess in guesses:
        reply = game.step(guess)
        paid += sum(reply.reward.values())
        if isinstance(reply, Done):
            return paid, [*said, "done"]
        said.append(reply.messages)
    return paid, said


def test_a_game_is_paid_for_the_find_and_for_information():
    assert play(5, "8", "4", "6", "5") == (pytest.approx(1.0), ["lower", "higher", "lower", "done"])
    assert play(8, "8") == (pytest.approx(1.0), ["done"])
    assert play(5, "8", "4", "6")[0] == pytest.approx(0.5)  # one number is left, and was not named
    assert play(5, "8") == (pytest.approx(math.log(15 / 7) / math.log(15) / 2), ["lower"])
    assert play(5, "8", "9", "8") == (play(5, "8")[0], ["lower"] * 3)  # nothing new
    for wrong in ("", "08", "16", "0", "-1", "5.", "five", "٥", "99999"):
        assert play(5, wrong) == (0.0, ["done"])


def test_halving_finds_every_number_in_four():
    for number in range(1, 16):
        low, high, guesses = 1, 15, []
        while not guesses or guesses[-1] != number:
            guesses.append((low + high) // 2)
            low, high = (guesses[-1] + 1, high) if guesses[-1] < number else (low, guesses[-1] - 1)
        assert len(guesses) <= 4
        assert play(number, *map(str, guesses))[0] == pytest.approx(1.0)


def test_demonstrations_are_legal_and_know_nothing_of_halving():
    sets = load_tasks("Guess.", 15, 4)
    first = [int(t.demonstration) for t in sets.sft if len(t.messages) == 1]
    assert 7.5 < sum(first) / len(first) < 8.5
    assert set(first) == set(range(1, 16))
    for task in sets.sft:
        low, high = 1, 15
        for said, hint in zip(task.messages[1::2], task.messages[2::2], strict=True):
            guess = int(said["content"])
            assert low <= guess <= high
            low, high = (guess + 1, high) if hint["content"] == "higher" else (low, guess - 1)
        assert low <= int(task.demonstration) <= high
    assert [len({task.answer for task in tasks}) for tasks in (sets.rl, sets.eval)] == [15, 15]


@pytest.mark.slow
def test_a_run_of_conversations_and_its_resume(tmp_path: Path):
    """Turns reach lines, metrics, rollouts and samples; a run that is resumed has the numbers of one that was not."""
    small = [
        "+recipe=guess_number",
        "sft.steps=60",
        "rl.steps=2",
        "rl.checkpoint_every=1",
        "rl.eval_every=0",
        "rollout.batch_size=32",
        "algo.minibatches=2",
    ]
    small += [
        "model.tiny.hidden_size=32",
        "model.tiny.intermediate_size=64",
        "rl.max_empty_steps=0",
        "rl.optimizer.schedule=constant",  # the end of another one is not known when the first run begins
        "eval.max_tasks=8",
    ]
    output = command(tmp_path, *small, "hydra.run.dir=run")
    assert " turns  trunc " in output
    lines = list(map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()))
    step = next(line for line in lines if line["stage"] == "rl")
    rows = read_rollouts(tmp_path / "run" / "rollouts" / "step_0001.parquet")
    assert max(row["completion"].count("assistant\n") for row in rows) > 0
    assert step["turns"] > 1
    assert sum(step["ends"].values()) == len(rows)
    for row in rows:
        assert sum(row["loss_mask"]) == sum(count for _, count in row["versions"])
    assert "assistant\n" in (tmp_path / "run" / "samples.md").read_text()

    command(tmp_path, *small, "rl.steps=1", "hydra.run.dir=half")
    command(tmp_path, "resume=half", "rl.steps=2")
    again = read_rollouts(tmp_path / "half" / "rollouts" / "step_0002.parquet")
    assert again == read_rollouts(tmp_path / "run" / "rollouts" / "step_0002.parquet")
