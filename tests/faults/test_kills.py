"""SIGKILL at a random moment of any phase, also in the middle of writing a checkpoint, again while it resumes; then every number as if never killed."""

import os
import random
from pathlib import Path

import pytest

from tests.faults.runs import Run, assert_same, draw, finished, left_of, run

TRIALS, TRIALS_OF_TWO = 12, 4
SEED = int(os.environ.get("HYBRID_RL_FAULT_SEED", "0"))


def kill_and_resume(whole: Path, folder: Path, ranks: int, trial: int) -> None:
    numbers = random.Random(f"{SEED}/{ranks}/{trial}")
    said = []
    for _ in range(numbers.choice([1, 1, 2, 3])):  # kills in a row
        if not finished(folder):
            moment = draw(numbers, whole)
            killed = Run(folder, "resume=auto", ranks=ranks, moment=moment, victim=numbers.randrange(ranks))
            codes = killed.wait()
            said.append(f"{moment}: {codes}\n{killed.output}")
            assert set(codes) <= {0, -9}, said
            assert not left_of(folder)
    if not finished(folder):
        said.append(run(folder, "resume=auto", ranks=ranks))
    try:
        assert_same(whole, folder)
    except AssertionError as error:
        error.add_note("\n".join(said))
        raise


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(TRIALS))
def test_a_run_killed_anywhere_goes_on_to_the_same_numbers(wholes, tmp_path, trial):
    kill_and_resume(wholes[1], tmp_path, 1, trial)


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(TRIALS_OF_TWO))
def test_two_ranks_killed_anywhere_go_on_to_the_same_numbers(wholes, tmp_path, trial):
    kill_and_resume(wholes[2], tmp_path, 2, trial)
