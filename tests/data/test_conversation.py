"""Replies in the forms that chat templates of the field have: appended ids are those of the whole conversation rendered at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.config import DataConfig
from hybrid_rl.data import DataError
from hybrid_rl.data.conversation import history_notes, reply_ids
from hybrid_rl.data.template import fix_template
from hybrid_rl.policy.tiny import character_tokenizer
from hybrid_rl.types import Task
from tests.data.test_template import NOON

TASK = Task("t", ({"role": "user", "content": "how many?"},), "5")
ROLES = "{% set names = {'assistant': 'model'} %}"
# forms of the field in our words: what stands around a turn, and what each does to its text
FORMS = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ["<|im_start|>", "<|im_end|>"],
        "<|im_end|>",
    ),
    "headers": (  # Llama 3: a start token, texts without blanks around them
        "{{ bos_token }}{% for m in messages %}<|begin|>{{ m.role }}<|head|>\n\n{{ m.content | trim }}<|turn|>{% endfor %}"
        "{% if add_generation_prompt %}<|begin|>assistant<|head|>\n\n{% endif %}",
        ["<s>", "<|begin|>", "<|head|>", "<|turn|>"],
        "<|turn|>",
    ),
    "alternating": (  # Gemma: another name of the assistant, and roles in turn
        "{{ bos_token }}" + ROLES + "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "<turn>{{ names[m.role] or m.role }}\n{{ m.content | trim }}</turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>model\n{% endif %}",
        ["<s>", "<turn>", "</turn>"],
        "</turn>",
    ),
    "instructions": (  # Mistral: marks around the user alone
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}",
        ["<s>", "</s>", "[INST]", "[/INST]"],
        "</s>",
    ),
    "thoughts": (  # Qwen3: thoughts of earlier answers are dropped
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ["<|im_start|>", "<|im_end|>"],
        "<|im_end|>",
    ),
    "channels": (  # gpt-oss: the last answer ends with another mark than earlier ones
        "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}"
        "{% if m.role == 'assistant' and loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant<|channel|>final<|message|>{% endif %}",
        ["<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|end|>"],
        "<|return|>",
    ),
}


def tokenizer_of(form: str):
    template, marks, _ = FORMS[form]
    tokenizer = character_tokenizer([])
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.bos_token = marks[0] if marks[0] == "<s>" else None
    tokenizer.chat_template = template
    return fix_template(tokenizer, DataConfig(), NOON)


def rendered(tokenizer, messages, goes_on=True) -> list[int]:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=goes_on, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


TEXTS = st.text("abc XYZ.,\n12", min_size=1, max_size=12).filter(str.strip)


@pytest.mark.parametrize("form", FORMS)
@given(answer=TEXTS, reply=TEXTS)
def test_what_is_appended_is_what_the_template_renders(form, answer, reply):
    tokenizer, end = tokenizer_of(form), FORMS[form][2]
    spoken = answer.strip()
    messages = [*TASK.messages, {"role": "assistant", "content": spoken}, {"role": "user", "content": reply}]
    prompt = rendered(tokenizer, list(TASK.messages))
    sampled = tokenizer.encode((" " if form == "instructions" else "") + spoken + end, add_special_tokens=False)
    grown = [*prompt, *sampled, *reply_ids(TASK, messages[2:], sampled[-1], tokenizer)]
    whole = rendered(tokenizer, messages)
    if form == "channels":  # what was sampled stays
        there = whole.index(tokenizer.convert_tokens_to_ids("<|end|>"), len(prompt))
        whole[there] = tokenizer.convert_tokens_to_ids("<|return|>")
    assert grown == whole


def test_an_answer_that_ended_with_another_token_is_closed_first():
    tokenizer = tokenizer_of("chatml")
    reply = [{"role": "user", "content": "more"}]
    after = reply_ids(TASK, reply, tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer)
    other = reply_ids(TASK, reply, tokenizer.convert_tokens_to_ids("<|pad|>"), tokenizer)
    assert other == [tokenizer.convert_tokens_to_ids("<|im_end|>"), *after]


@pytest.mark.parametrize(
    ("form", "notes"),
    [
        ("chatml", []),
        (
            "thoughts",
            ["the chat template drops the thoughts of earlier answers; the conversation keeps what was sampled"],
        ),
        (
            "headers",
            ["the chat template drops the blanks around earlier answers; the conversation keeps what was sampled"],
        ),
    ],
)
def test_a_template_that_rewrites_earlier_answers_is_told_at_the_start(form, notes):
    assert list(history_notes(TASK, "user", tokenizer_of(form))) == notes


def test_a_template_may_write_replies_as_json():
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ m.content }}", "{{ m.content | tojson if m.role == 'tool' else m.content }}"
    )
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    text = tokenizer.decode(reply_ids(TASK, [{"role": "tool", "content": 'say "hi"\n'}], end, tokenizer))
    assert text == '\n<|im_start|>tool\n"say \\"hi\\"\\n"<|im_end|>\n<|im_start|>assistant\n'


def test_a_role_that_the_template_refuses_or_leaves_out_is_an_error():
    with pytest.raises(DataError, match="chat template does not take a reply of the environment: roles must alternate"):
        list(history_notes(TASK, "tool", tokenizer_of("alternating")))
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "for m in messages", "for m in messages if m.role != 'tool'"
    )
    with pytest.raises(DataError, match="leaves out what the environment replies as tool"):
        list(history_notes(TASK, "tool", tokenizer))
