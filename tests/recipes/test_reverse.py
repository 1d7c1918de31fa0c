"""The worked example's task: its published reward values, and data whose sets never meet."""

import pytest
from hybrid_rl.recipes.reverse import load_tasks, similarity

from hybrid_rl.types import Task

SENTENCE = "In 1891 the community inaugurated its own cemetery"
TRUTH = SENTENCE[::-1]
TASK = Task("t", ({"role": "user", "content": SENTENCE},), TRUTH)
SIZES = {"system_prompt": "s", "min_length": 8, "max_length": 28, "eval_tasks": 128}


def reward(answer: str) -> float:
    return similarity(f"<reversed_text>{answer}</reversed_text>", TASK)


def test_published_values():
    assert reward(TRUTH) == 1.0
    assert round(reward(TRUTH.replace("m", "", 1)), 2) == 0.99  # one dropped letter
    assert round(reward(TRUTH.replace("1981", "1891")), 2) == 0.98  # the year left unreversed
    assert round(reward(" ".join(SENTENCE.split()[::-1])), 2) == 0.40  # right words, forward letters


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (TRUTH, 0.0),  # no tag
        (f"<reversed_text>{TRUTH}", 0.0),  # never closed
        ("<reversed_text></reversed_text>", 0.0),
        (f"well: <reversed_text>\n {TRUTH} \n</reversed_text> so", 1.0),  # stripped, and text around it
        (f"<reversed_text>x</reversed_text><reversed_text>{TRUTH}</reversed_text>", 0.0),  # the first tag counts
    ],
)
def test_answer_tag(completion, expected):
    assert similarity(completion, TASK) == pytest.approx(expected)


def test_ratio_depends_on_the_order_of_its_arguments():
    """difflib's ratio(tide, diet) is 0.25 and ratio(diet, tide) 0.5: the answer comes first."""
    assert similarity("<reversed_text>tide</reversed_text>", Task("t", TASK.messages, "diet")) == 0.25
    assert similarity("<reversed_text>diet</reversed_text>", Task("t", TASK.messages, "tide")) == 0.5


def test_sets_never_meet():
    sets = load_tasks(**SIZES)
    texts = {
        name: {t.messages[-1]["content"] for t in tasks}
        for name, tasks in (("sft", sets.sft), ("rl", sets.rl), ("eval", sets.eval))
    }
    assert len(sets.eval) == 128
    assert len(sets.rl) > 1000
    assert len(sets.sft) > 5000
    assert not texts["sft"] & texts["rl"]
    assert not texts["eval"] & (texts["sft"] | texts["rl"])
    assert all(8 <= len(text) <= 28 for name in texts for text in texts[name])


def test_a_sentence_keeps_its_set_whatever_lengths_are_chosen():
    narrow, wide = load_tasks("s", 8, 16, 10**6), load_tasks("s", 8, 32, 10**6)
    for name in ("sft", "rl", "eval"):
        assert {t.id for t in getattr(narrow, name)} <= {t.id for t in getattr(wide, name)}


def test_demonstrations_earn_the_full_reward():
    for task in load_tasks(**SIZES).sft[:200]:
        assert similarity(task.demonstration, task) == 1.0
        assert task.answer == task.messages[-1]["content"][::-1]
