"""Recipes for real models: each composes, its tasks load, and its reward pays what hand-made completions earn."""

import itertools
import json
import operator
import random
from fractions import Fraction
from pathlib import Path

import pytest
from hybrid_rl.recipes import arithmetic, code, countdown, judge, reasoning_gym
from hybrid_rl.recipes import format as orders
from omegaconf import OmegaConf

from hybrid_rl.config import ConfigError
from hybrid_rl.data.tasks import DataError, TaskSets, load_task_sets
from hybrid_rl.preflight.names import CONF
from hybrid_rl.preflight.settings import load
from hybrid_rl.rewards import JsonSchema, json_fields, matches, numeric
from hybrid_rl.sandbox.code import passes_tests, read_tests
from hybrid_rl.types import Task
from tests.sandbox.test_sandbox import needs_sandbox

# what a recipe asks its user for
ASKED = {
    "reverse_opd": ["algo.teacher={here}"],
    "judge": ["reward.judge.url=http://127.0.0.1:1/v1", "reward.judge.model=judge"],
    "gsm8k": ["data.rl.path={here}/gsm8k"],
}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that passes for a teacher's, with a gsm8k of two questions for each split."""
    folder = tmp_path_factory.mktemp("asked")
    (folder / "config.json").write_text("{}")
    (folder / "gsm8k" / "main").mkdir(parents=True)
    splits = [{"split": s, "path": f"main/{s}.jsonl"} for s in ("train", "test")]
    configs = json.dumps({"configs": [{"config_name": "main", "data_files": splits}]})
    (folder / "gsm8k" / "README.md").write_text(f"---\n{configs}\n---\n")
    for split in ("train", "test"):
        lines = [{"question": f"{split} {i}?", "answer": f"It is 4.\n#### {i}"} for i in range(40)]
        (folder / "gsm8k" / "main" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def composed(name: str, here: Path):
    return load([f"+recipe={name}", "preset=tiny", *(s.format(here=here) for s in ASKED.get(name, []))])


def loaded(name: str, here: Path) -> TaskSets:
    return load_task_sets(dict(composed(name, here).data), rl_tasks=8, sft_tasks=0)


@pytest.mark.parametrize("name", sorted(file.stem for file in (CONF / "recipe").glob("*.yaml")))
def test_every_recipe_composes(name, here):
    config = composed(name, here)
    assert config.name == name
    assert config.reward or config.environment


NAMES = ["arithmetic", "code", "countdown", "format", "gsm8k", "judge", "reasoning_gym"]


@pytest.mark.parametrize("name", NAMES)
def test_held_out_prompts_are_not_trained_on(name, here):
    if package := {"gsm8k": "datasets", "reasoning_gym": "reasoning_gym"}.get(name):
        pytest.importorskip(package)
    sets = loaded(name, here)
    trained = {task.messages[-1]["content"] for task in sets.rl}
    assert trained
    assert sets.eval
    assert not trained & {task.messages[-1]["content"] for task in sets.eval}


def given(answer: str, **columns) -> Task:
    return Task("t", ({"role": "user", "content": "?"},), answer, columns=columns)


def test_sums_are_right_and_no_pair_is_in_both_sets(here):
    pairs = {}
    for held_out in (False, True):
        rows = arithmetic.rows([1, 2], 60, held_out)
        texts = [row["prompt"][-1]["content"].split(" + ") for row in rows]
        assert all(int(a) + int(b) == row["answer"] for (a, b), row in zip(texts, rows, strict=True))
        assert {row["source"] for row in rows} == {"1 digits", "2 digits"}
        pairs[held_out] = {tuple(sorted(text)) for text in texts}
    assert not pairs[False] & pairs[True]
    with pytest.raises(ValueError, match="there are fewer than 200 sums"):
        arithmetic.rows([1], 200, False)
    reward = composed("arithmetic", here).reward
    assert numeric("58 + 31 = 89", given("89"))[0] == 1.0
    assert [matches(text, given(""), reward.form.pattern) for text in ("58 + 31 = 89", "It is 89")] == [1.0, 0.0]


def test_an_order_in_json(here):
    pytest.importorskip("jsonschema")
    config = composed("format", here).reward
    schema = JsonSchema(OmegaConf.to_container(config.schema.schema))
    task = orders.rows(1, True)[0]
    truth = json.loads(task["answer"])
    assert str(truth["item"]) in task["prompt"][-1]["content"]
    for wrong, accepted, paid in [
        ({}, 1, 1),
        ({"count": str(truth["count"])}, 0, 2 / 3),
        ({"colour": "red"}, 0, 3 / 4),
    ]:
        text = json.dumps(truth | wrong)
        assert (schema(text, given("")), json_fields(text, given(task["answer"]))[0]) == (accepted, pytest.approx(paid))
    assert config.schema.weight + config.fields.weight == 1


OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def expressions(numbers: tuple[int, ...]):
    """Yield (text, value) of every expression of the numbers in this order, bracketed in every way."""
    if len(numbers) == 1:
        yield str(numbers[0]), Fraction(numbers[0])
    for cut in range(1, len(numbers)):
        for (a, x), (b, y) in itertools.product(expressions(numbers[:cut]), expressions(numbers[cut:])):
            for sign, operate in OPERATORS.items():
                if sign != "/" or y:
                    yield f"({a} {sign} {b})", operate(x, y)


def test_expressions_are_evaluated_exactly():
    for numbers in [(3, 7), (2, 3, 4), (6, 1, 5, 5)]:
        for text, value in expressions(numbers):
            assert countdown.evaluate(text) == (value, sorted(numbers))
    assert countdown.evaluate("1 / (2 - 2)") is None
    for text in [
        "",
        "2 ** 9",
        "-3",
        "3 +",
        "abs(3)",
        "1.5",
        "True",
        "'a' * 9",
        "x",
        "3; 4",
        "9" * 201,
        "(" * 150,
        "1 if 2 else 3",
    ]:
        assert countdown.evaluate(text) is None, text


def test_every_countdown_has_a_solution_which_pays_all():
    for row in random.Random(1).sample(countdown.rows([2, 3], 12, 300, False), 30):
        task = given(str(row["answer"]), numbers=row["numbers"])
        every = [e for order in itertools.permutations(row["numbers"]) for e in expressions(order)]
        for text, value in every:
            (parts, measures) = countdown.reaches(f"{text} = 1", task)
            assert parts == {"form": 0.2, "goal": 0.8 * (value == row["answer"])}
            assert measures["near"] == pytest.approx(1 / (1 + abs(value - row["answer"])))
        assert any(value == row["answer"] for _, value in every)


def test_a_countdown_needs_each_number_once():
    task = given("14", numbers=[3, 5, 6])
    right = {"form": 0.2, "goal": 0.8}
    for text, parts in [
        ("3 + 5 + 6", right),
        ("so:\n(6 + 5) + 3 = 14", right),
        ("14", None),
        ("3 + 5 + 6 + 0", None),
        ("7 + 7", None),
    ]:
        assert countdown.reaches(text, task)[0] == (parts or {"form": 0.0, "goal": 0.0}), text
    assert countdown.reaches("<answer>6+5+3</answer> bye", task, within="answer")[0] == right


def test_gsm8k_pays_the_number_in_the_box(here):
    pytest.importorskip("datasets")
    task = loaded("gsm8k", here).rl[7]
    within = composed("gsm8k", here).reward.right.within
    assert (task.answer, numeric(r"3 and \boxed{7.0} apples", task, within)[0]) == ("It is 4.\n#### 7", 1.0)
    assert numeric("It is 7.", task, within)[0] == 0.0


def test_reasoning_gym_scores_its_own_answers():
    gym = pytest.importorskip("reasoning_gym")
    rows = reasoning_gym.rows({"chain_sum": {"max_terms": 3}, "letter_counting": {}}, 3, seed=5)
    assert [row["source"] for row in rows] == ["chain_sum"] * 3 + ["letter_counting"] * 3
    theirs = gym.create_dataset("letter_counting", size=3, seed=5)
    assert rows[4]["prompt"] == theirs[1]["question"]
    for row in rows:
        task = given(row["answer"], made=row["made"], index=row["index"])
        assert reasoning_gym.score(f"so <answer>{row['answer']}</answer>", task)[0] == 1.0
        assert reasoning_gym.score("<answer>no</answer>", task)[1] == {"exact": 0.0, "answer": "no"}
        assert reasoning_gym.score(row["answer"], task)[0] == 0.0
    with pytest.raises(DataError, match="cannot make chain_sums with"):
        reasoning_gym.rows({"chain_sums": {}}, 3, seed=5)


def test_functions_to_write_have_tests_that_a_right_one_alone_passes():
    for row in [*code.rows(False), *code.rows(True)]:
        function, tests = read_tests(given(row["answer"]))
        assert (function, len(tests)) == ("solve", 5)
        assert len({json.dumps(result) for _, result in tests}) > 1 or "whether" in row["prompt"]


@needs_sandbox
def test_a_function_is_run():
    wanted = "how many numbers are greater than 3"
    row = next(row for row in code.rows(True) if wanted in row["prompt"])
    for body, paid in [("sum(n > 3 for n in numbers)", 1.0), ("-1", 0.0)]:
        text = f"```python\ndef solve(numbers):\n    return {body}\n```"
        assert passes_tests(text, given(row["answer"]))["tests"] == paid


def test_mbpp(tmp_path):
    file = tmp_path / "mbpp.jsonl"
    tests = [
        ["assert f([1, 2], -1) == 'a'", "assert f([], 0) == ''"],
        ["assert f((1, 2)) == 3"],
        ["assert is_it(f(1))"],
        [],
    ]
    file.write_text("\n".join(json.dumps({"text": "Write f.", "code": "", "test_list": t}) for t in tests))
    (row,) = code.mbpp(str(file))
    wanted = [{"args": [[1, 2], -1], "result": "a"}, {"args": [[], 0], "result": ""}]
    assert row["answer"] == {"function": "f", "tests": wanted}
    file.write_text(json.dumps({"prompt": "Write f.", "test_list": tests[1]}))
    with pytest.raises(DataError, match="has no task whose tests are like"):
        code.mbpp(str(file))


def test_one_sentence():
    for text, paid in [
        ("It moves water.", 1.0),
        ("It moves water. It turns.", 0.0),
        ("It moves water", 0.0),
        ("", 0.0),
    ]:
        assert judge.one_sentence(text, given("")) == paid


def test_a_judge_must_be_named():
    with pytest.raises(ConfigError, match=r"reward.judge.model=\?\?\?.*set reward.judge.model"):
        load(["+recipe=judge", "preset=tiny"])
