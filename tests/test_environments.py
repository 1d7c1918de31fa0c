"""Ready environments: tools in each model's own format, Gymnasium's interface, and what settings may name."""

from __future__ import annotations

import asyncio

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.environments import Done, Gymnasium, Reply, Tools
from hybrid_rl.environments.base import Facts, facts_of
from hybrid_rl.preflight.settings import load
from hybrid_rl.types import Task

TASK = Task("t", ({"role": "user", "content": "what is 2 + 3?"},), "5")
FUNCTIONS = ["tests.environments.add", "tests.environments.divide"]


def told(completion: str, **settings):
    environment = Tools(FUNCTIONS, **settings)
    environment.reset(TASK)
    return asyncio.run(environment.step(completion))


@pytest.mark.parametrize(
    ("format", "completion", "results"),
    [
        ("hermes", 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>', ["5"]),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call><tool_call>{"name": "divide", '
            '"arguments": {"a": 1, "b": 2}}</tool_call>',
            ["5", "0.5"],
        ),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}', ["5"]),
        (
            "hermes",
            "<tool_call>add(2, 3)</tool_call>",
            ["Error: the call is not JSON: Expecting value: line 1 column 1 (char 0)"],
        ),
        ("hermes", '<tool_call>["add"]</tool_call>', ['Error: a call must be {"name": "…", "arguments": {…}}']),
        (
            "hermes",
            '<tool_call>{"name": "sub", "arguments": {}}</tool_call>',
            ["Error: there is no function sub; there are: add, divide"],
        ),
        (
            "hermes",
            '<tool_call>{"name": "divide", "arguments": {"a": 1, "b": 0}}</tool_call>',
            ["Error: ZeroDivisionError: division by zero"],
        ),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
            ["Error: TypeError: add() missing 1 required positional argument: 'b'"],
        ),
        ("llama", '{"name": "add", "parameters": {"a": 2, "b": 3}}', ["5"]),
        ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 2, "b": 3}}<|eom_id|>', ["5"]),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": 3}}]', ["5"]),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 1}}, {"name": "add", "arguments": {"a": 2, "b": 2}}]',
            ["2", "4"],
        ),
    ],
)
def test_calls_are_answered_with_results_or_errors(format, completion, results):
    reply = told(completion, format=format)
    assert reply == Reply([{"role": "tool", "content": text} for text in results])


@pytest.mark.parametrize("format", ["hermes", "llama", "mistral"])
def test_an_answer_without_a_call_ends_the_conversation(format):
    assert told("It is 5.", format=format) == Done(None, {"tool_calls": 0, "tool_errors": 0})


def test_calls_and_errors_are_measured_and_long_results_cut():
    environment = Tools(["tests.environments.add"], role="user")
    environment.reset(TASK)
    call = '<tool_call>{{"name": "add", "arguments": {{"a": "{}", "b": "{}"}}}}</tool_call>'
    reply = asyncio.run(environment.step(call.format("x" * 1500, "y" * 1500) + "<tool_call>"))
    assert len(reply.messages[0]["content"]) == 2001
    assert [message["role"] for message in reply.messages] == ["user", "user"]
    assert asyncio.run(environment.step("5")) == Done(None, {"tool_calls": 2, "tool_errors": 1})


def test_a_class_says_its_role_and_its_tools():
    facts = facts_of({"_target_": "hybrid_rl.environments.Tools", "functions": FUNCTIONS})
    assert facts.role == "tool"
    add = facts.tools[0]["function"]
    assert (add["name"], add["description"]) == ("add", "Add two numbers.")
    assert add["parameters"]["properties"]["a"] == {"type": "integer", "description": "the first"}
    assert facts_of({"_target_": "tests.environments.Guess", "cost": 1.0}) == Facts()
    with pytest.raises(ValueError, match=r"^tests.environments.undescribed: .*docstring"):
        facts_of({"_target_": "hybrid_rl.environments.Tools", "functions": ["tests.environments.undescribed"]})


def test_gymnasiums_interface():
    environment = Gymnasium("tests.environments.Counter")
    environment.reset(Task("t", TASK.messages, "", columns={"seed": 2}))
    assert environment.step(" next\n") == Reply("1 to go", 0.5)
    assert environment.step("what") == Reply("1 to go", 0.5)
    assert environment.step("next") == Done(0.5)


RECIPE = ["+recipe=guess_number"]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["environment._target_=tests.environments.Gues"],
            "environment._target_=tests.environments.Gues (command line): tests.environments defines no 'Gues'; did you mean Guess?",
        ),
        (
            ["environment.moost=3"],
            "environment.moost=3 (command line): there is no such key; there are: _target_, most; to add it, write +environment.moost=3",
        ),
        (
            ["+environment.moost=3"],
            "environment.moost=3 (command line): hybrid_rl.recipes.guess_number.Guess takes no such argument; there are: most",
        ),
        (["rollout.max_turns=0"], "rollout.max_turns=0 (command line): must be at least 1"),
        (
            ["reward_model.path={tiny}"],
            "reward_model.path={tiny} (command line): scores single answers, and environment._target_ makes conversations; leave one out",
        ),
    ],
)
def test_settings_are_checked_before_anything_loads(overrides, line, tiny_folder):
    overrides = [text.replace("{tiny}", str(tiny_folder)) for text in overrides]
    with pytest.raises(ConfigError) as error:
        load([*RECIPE, *overrides])
    assert str(error.value) == line.replace("{tiny}", str(tiny_folder))
