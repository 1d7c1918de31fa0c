"""Prompts are the same whenever they are rendered, say what the template leaves out, and never wait for ever."""

from dataclasses import replace
from datetime import datetime

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hybrid_rl.config import DataConfig
from hybrid_rl.data import DataError, TaskSets, render
from hybrid_rl.data.render import Limits, check_prompts, demonstration, prompt_ids
from hybrid_rl.data.template import fix_template
from hybrid_rl.model_folder.read import ModelError
from hybrid_rl.policy.tiny import CHAT_TEMPLATE, character_tokenizer
from hybrid_rl.run_folder.checkpoint import CheckpointError
from hybrid_rl.run_folder.clock import FILE, read_clock, start_clock
from hybrid_rl.types import Task

NOON = datetime(2024, 5, 6, 12, 0, 0)
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
# as in Llama 3.2's, Qwen3's and SmolLM3's templates
DATE = "{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y %H:%M:%S.%f') %}{%- endif %}{{ date_string }}|"
THINKING = PLAIN + "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
GENERATION = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% if loop.last %}{% break %}{% endif %}{% endfor %}"


def tokenizer_of(template):
    tokenizer = character_tokenizer([])
    tokenizer.chat_template = template
    return tokenizer


def task(id, *contents, roles=("system", "user", "assistant", "user"), demonstration="d"):
    roles = roles[1:] if len(contents) == 1 else roles
    return Task(
        id,
        tuple({"role": role, "content": content} for role, content in zip(roles, contents, strict=False)),
        "1",
        demonstration,
    )


def check(tokenizer, *tasks, sft=False):
    sets = TaskSets(list(tasks), [], []) if sft else TaskSets([], list(tasks), [])
    return check_prompts(sets, tokenizer, 300, Limits(500, 1000), sft=sft)


def text_of(tokenizer, one):
    return tokenizer.decode(prompt_ids(one, tokenizer, 500))


# ---- the clock ------------------------------------------------------------------------------------------------------------


def test_templates_are_told_the_time_of_the_run():
    fixed = fix_template(tokenizer_of(DATE + PLAIN), DataConfig(template_arguments={}), NOON)
    expected = "06 May 2024 12:00:00.000000|hi"
    assert text_of(fixed, task("t", "hi")) == expected
    sample = demonstration(task("t", "hi"), fixed, 500)
    assert fixed.decode(sample.token_ids[: sample.prompt_length]) == expected
    assert check(fixed, task("t", "hi")).lengths["rl"] == [len(expected)]
    other = tokenizer_of(DATE + PLAIN)  # and nobody else
    assert text_of(other, task("t", "hi")) != text_of(other, task("t", "hi"))
    other = fix_template(fixed, DataConfig(template_arguments={"date_string": "today"}), NOON)
    assert text_of(other, task("t", "hi")) == "today|hi"


def test_the_clock_is_kept_in_the_runs_folder(tmp_path):
    now = start_clock(tmp_path)
    assert abs((datetime.now() - now).total_seconds()) < 60
    assert read_clock(tmp_path) == now
    for damage in ("", "yesterday", "\0"):
        (tmp_path / FILE).write_text(damage)
        with pytest.raises(CheckpointError, match=r"clock\.txt is missing or damaged"):
            read_clock(tmp_path)


@pytest.mark.parametrize("template", [PLAIN + "{{ range(100000) | random }}", PLAIN + "{{ lipsum() }}"])
def test_a_template_that_is_random_is_refused(template):
    with pytest.raises(DataError, match="task t: the chat template gives another prompt each time"):
        check(tokenizer_of(template), task("t", "hi"))


# ---- arguments ------------------------------------------------------------------------------------------------------------


def test_arguments_reach_the_template():
    fixed = fix_template(tokenizer_of(THINKING), DataConfig(template_arguments={"enable_thinking": False}), NOON)
    assert text_of(fixed, task("t", "hi")) == "hi<think></think>"
    assert check(fixed, task("t", "hi")).notes == []
    tools = [{"type": "function", "function": {"name": "add"}}]
    fixed = fix_template(
        tokenizer_of(PLAIN + "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"),
        DataConfig(template_arguments={"tools": tools}),
        NOON,
    )
    assert text_of(fixed, task("t", "hi")) == "hiadd"
    assert check(fixed, task("t", "hi")).notes == []


ARGUMENTS = {
    "a misspelled one": (THINKING, {"enable_thinkin": False}, "enable_thinkin=false: the model's chat template uses no such variable; did you mean enable_thinking?"),
    "one of another model": (THINKING, {"reasoning_effort": "low"}, 'reasoning_effort="low": the model\'s chat template uses no such variable; there are: enable_thinking'),
    "none known": (PLAIN, {"x": 1}, "x=1: the model's chat template uses no such variable; there are: none"),
    "with transformers' own tags": (GENERATION, {"x": 1}, "x=1: the model's chat template uses no such variable; there are: none"),
    "a function of the environment": (DATE, {"strftime_now": 1}, "strftime_now=1: the model's chat template uses no such variable; there are: date_string"),
    "the run's own": (PLAIN, {"messages": []}, "messages=[]: is set by the run; remove it"),
    "the other of the run's own": (PLAIN, {"add_generation_prompt": False}, "add_generation_prompt=false: is set by the run; remove it"),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_the_template_does_not_use_are_refused(name):
    template, arguments, expected = ARGUMENTS[name]
    with pytest.raises(DataError) as raised:
        check(fix_template(tokenizer_of(template), DataConfig(template_arguments=arguments), NOON), task("t", "hi"))
    assert str(raised.value) == f"data.template_arguments.{expected}"


def test_a_template_that_is_none_is_told_of_where_arguments_are_checked():
    for broken in ("{% if %}", {"tool_use": PLAIN, "other": PLAIN}):
        with pytest.raises(DataError, match="the model's chat template cannot be read: "):
            check(fix_template(tokenizer_of(broken), DataConfig(template_arguments={"x": 1}), NOON), task("t", "hi"))
        with pytest.raises(DataError, match="task t: the tokenizer's chat template does not take its messages: "):
            check(fix_template(tokenizer_of(broken), DataConfig(template_arguments={}), NOON), task("t", "hi"))


def test_an_argument_that_changes_nothing_is_told_of():
    """A text is true to a template, whatever it says."""
    fixed = fix_template(tokenizer_of(THINKING), DataConfig(template_arguments={"enable_thinking": "false"}), NOON)
    assert check(fixed, task("t", "hi")).notes == ['data.template_arguments.enable_thinking="false" changes no prompt']


# ---- messages that the template leaves out ----------------------------------------------------------------------------------

ONLY_USERS = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
DROPPED = {
    "all shown": (CHAT_TEMPLATE, ["Be short.", "hi", "ho", "hm"], []),
    "trimmed": ("{% for m in messages %}{{ m.content | trim }}{% endfor %}", [" Be short.\n", "\thi "], []),
    "as JSON": ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", ['Say "é"\n', "hi"], []),
    "as other blanks": ("{{ messages[0].content | replace('\n', ' ') }}{{ messages[1].content }}", ["Be\n  short.", "hi"], []),
    "in another order": ("{{ messages[1].content }}{{ messages[0].content }}", ["Be short.", "hi"], []),
    "a thought": ("{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}", ["s", "hi", "<think>hm</think>\nho", "u"], []),
    "system": (ONLY_USERS, ["Be short.", "hi"], ["system"]),
    "system, inside the user's": (ONLY_USERS, ["hi", "hi there"], ["system"]),
    "system and assistant": (ONLY_USERS, ["Be short.", "hi", "ho", "hm"], ["assistant", "system"]),
    "an earlier turn": ("{{ messages[0].content }}{{ messages[-1].content }}", ["Be short.", "hi", "ho", "hm"], ["assistant", "user"]),
}  # fmt: skip


@pytest.mark.parametrize("name", DROPPED)
def test_messages_that_the_template_leaves_out(name):
    template, contents, roles = DROPPED[name]
    notes = check(tokenizer_of(template), task("a", *contents), task("b", *contents)).notes
    assert [note.partition(" message of ")[0] for note in notes] == [
        f"the chat template leaves out the {role}" for role in roles
    ]
    assert all(" message of 2 tasks (first: task a); the model never sees its text." in note for note in notes)


# ---- programs that do not end ----------------------------------------------------------------------------------------------

FOR_EVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LOOPS = {
    "at once": (FOR_EVER, "a", "takes more than 1 s"),
    "for one task": (PLAIN + "{% if messages[0].content == 'x' %}" + FOR_EVER + "{% endif %}", "b", "takes more than 1 s"),
    "ever longer": (PLAIN + FOR_EVER.replace("{% endfor %}{% endfor %}", "xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}"), "a", "takes more than 1 s"),
    "in one operation": (PLAIN + "{{ 7 ** (messages | length * 99999999) }}", "a", "takes more than 1 s"),
    "in memory": (PLAIN + "{{ 'x' * 10 ** 11 }}", "a", "needs more than 4 GiB of memory"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_a_template_that_does_not_end(name, monkeypatch):
    monkeypatch.setattr(render, "SECONDS", 1)
    template, at, what = LOOPS[name]
    tokenizer = tokenizer_of(template)
    tokenizer.name_or_path = "/models/x"
    with pytest.raises(DataError) as raised:
        check(tokenizer, task("a", "hi"), task("b", "x"))
    assert (
        str(raised.value)
        == f"task {at}: the chat template of /models/x {what}; mend it in the model's folder, or use another model"
    )


def backtracking_tokenizer():
    inner = Tokenizer.from_str(character_tokenizer([])._tokenizer.to_str())
    split = pre_tokenizers.Split(Regex(r"(x+x+)+y"), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE)


@pytest.mark.parametrize("sft", [False, True])
def test_a_tokenizer_that_panics(sft, capfd):
    """What the tokenizers library raises then is no Exception."""
    bad = task("b", "hi", demonstration="x" * 60) if sft else task("b", "x" * 60)
    with pytest.raises(DataError) as raised:
        check(backtracking_tokenizer(), task("a", "hi"), bad, task("c", "hi"), sft=sft)
    where = "task b, demonstration" if sft else "task b"
    assert str(raised.value).startswith(f"{where}: the tokenizer of the model ended with PanicException: ")
    assert "\n" not in str(raised.value)
    assert capfd.readouterr().err == ""


# ---- tools of a task's own, and no template --------------------------------------------------------------------------------


def test_a_task_shows_its_own_tools():
    shows = PLAIN + "{% for tool in tools or [] %}[{{ tool.name }}]{% endfor %}"
    fixed = fix_template(tokenizer_of(shows), DataConfig(tools="tools"), NOON)
    columns = [{"tools": [{"name": "add"}]}, {"tools": '[{"name": "add"}, {"name": "sub"}]'}, {"tools": None}, {}]
    tasks = [replace(task(f"t{i}", "hi"), columns=own) for i, own in enumerate(columns)]
    assert [text_of(fixed, one) for one in tasks] == ["hi[add]", "hi[add][sub]", "hi", "hi"]
    assert check(fixed, *tasks).notes == []
    for bad in ("add", [1], {"name": "add"}):
        with pytest.raises(
            DataError, match=r"^task t: tools=.*: must be a list of JSON descriptions of tools, or its text"
        ):
            check(fixed, replace(task("t", "hi"), columns={"tools": bad}))
    with pytest.raises(DataError, match=r"^data.tools=tools: the model's chat template shows no tools; leave it out"):
        check(fix_template(tokenizer_of(PLAIN), DataConfig(tools="tools"), NOON), task("t", "hi"))


@pytest.mark.parametrize("begins", [False, True])
def test_a_base_model_needs_no_template(begins):
    """The prompt is the messages' text, after the start token if the tokenizer puts one; the end token ends an answer."""
    tokenizer = tokenizer_of(None)
    with pytest.raises(ModelError, match=r"has no chat template; .* or set data.chat_template=false for a base model"):
        fix_template(tokenizer, DataConfig(), NOON)
    if begins:
        tokenizer.bos_token = "<|im_start|>"
        tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", tokenizer.bos_token_id)]
        )
    fixed = fix_template(tokenizer, DataConfig(chat_template=False), NOON)
    one = task("t", "Answer.", "1 + 1?", roles=("system", "user"), demonstration="2")
    start = "<|im_start|>" if begins else ""
    assert text_of(fixed, one) == f"{start}Answer.\n\n1 + 1?"
    assert fixed.decode(demonstration(one, fixed, 100).token_ids) == f"{start}Answer.\n\n1 + 1?2<|im_end|>"
    assert check(fixed, one, sft=True).notes == []
