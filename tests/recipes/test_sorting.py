"""The recipe sorting: demonstrations hold no rule, the reward pays partial credit and nothing else, its control knows nothing."""

import json
import subprocess
import sys
from itertools import permutations
from statistics import fmean

import pytest
from hybrid_rl.recipes.sorting import in_place, load_tasks, shuffled_truth

from hybrid_rl.types import Task

TASK = Task("t", ({"role": "user", "content": "dbca"},), "abcd")


@pytest.mark.parametrize(
    ("completion", "paid", "exact"),
    [
        ("<answer>abcd</answer>", 1.0, 1.0),
        ("<answer>abdc</answer>", (2 + 2) / 8, 0.0),
        ("<answer>bacd</answer>", (2 + 0) / 8, 0.0),
        ("<answer>dcba</answer>", 0.0, 0.0),
        ("<answer>abc</answer>", 0.0, 0.0),
        ("<answer>abcd</answer> ", 0.0, 0.0),
        ("a<answer>abcd</answer>", 0.0, 0.0),
        ("abcd", 0.0, 0.0),
    ],
)
def test_what_is_paid(completion, paid, exact):
    assert in_place(completion, TASK) == (paid, {"exact": exact})


def test_the_control_pays_no_order_more_than_another():
    orders = ["".join(p) for p in permutations("abcd")]
    tasks = [Task(f"t{i}", TASK.messages, "abcd") for i in range(400)]
    means = [fmean(shuffled_truth(f"<answer>{order}</answer>", task)[0] for task in tasks) for order in orders]
    assert max(means) - min(means) < 0.12  # five standard errors of a mean of 400
    assert shuffled_truth("<answer>abcd</answer>", TASK)[1] == {"exact": 1.0}


def test_sets_are_disjoint_and_demonstrations_know_no_rule():
    sets = load_tasks("s", 4, 6)
    texts = [task.messages[-1]["content"] for tasks in (sets.sft, sets.rl, sets.eval) for task in tasks]
    assert len(set(texts)) == len(texts) == 16256
    shown = [task.demonstration.removeprefix("<answer>").removesuffix("</answer>") for task in sets.sft]
    assert all(sorted(given) == sorted(task.answer) for given, task in zip(shown, sets.sft, strict=True))
    right = fmean(given == task.answer for given, task in zip(shown, sets.sft, strict=True))
    assert right == pytest.approx((1 / 24 + 1 / 120 + 1 / 720) / 3, abs=0.005)
    assert load_tasks("s", 4, 6).digests() == sets.digests()


@pytest.mark.slow
def test_rl_teaches_what_no_demonstration_shows(tmp_path):
    """On a seed that nothing was chosen on, half of the recipe's steps."""
    command = [sys.executable, "-m", "hybrid_rl.run", "+recipe=sorting", "seed=3", "rl.steps=100", "rl.eval_every=0"]
    subprocess.run([*command, f"hydra.run.dir={tmp_path / 'run'}"], cwd=tmp_path, check=True, timeout=900)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    found = {line["name"]: line for line in lines if line["stage"] == "eval"}
    assert found["sft"]["measures"]["exact"] < 0.06
    assert found["rl"]["measures"]["exact"] > 0.3
    assert found["rl"]["greedy"]["measures"]["exact"] > 0.5
