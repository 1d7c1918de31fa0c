"""Tokenizers: text becomes the ids that tokenizer.json says, and a turn ends as the chat template ends one."""

import json
import shutil

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from hybrid_rl.data.render import Limits, check_prompts, completion_text, demonstration
from hybrid_rl.data.tasks import TaskSets
from hybrid_rl.model_folder.read import ModelError
from hybrid_rl.model_folder.tokenizer import PROBE, closing, exact_text, read_tokenizer
from hybrid_rl.policy.model import Policy
from hybrid_rl.types import Task

CPU = torch.device("cpu")
TASK = Task("t", ({"role": "user", "content": "hi"},), "", "ab")


@pytest.fixture
def folder(tiny_folder, tmp_path):
    return shutil.copytree(tiny_folder, tmp_path / "model")


def write(file, **changes):
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


SPLITS = {
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    "threes": pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]),
    "whole": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "GPT2Tokenizer",
        "LlamaTokenizerFast",
        "Qwen2TokenizerFast",
        "PreTrainedTokenizerFast",
        "GPTNeoXTokenizerFast",
        None,
    ],
)
@pytest.mark.parametrize("split", SPLITS)
def test_ids_are_those_of_tokenizer_json_whatever_class_is_named(folder, name, split):
    """Numbers of up to five digits, blanks and a word are pieces of the vocabulary, so each splitting shows."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("1", "2"), ("12", "3"), ("123", "4"), ("1234", "5"), ("Ġ", "Ġ"), ("Ċ", "Ċ"), ("'", "s")]
    own = Tokenizer(models.BPE({piece: i for i, piece in enumerate([*alphabet, *(a + b for a, b in merges)])}, merges))
    own.pre_tokenizer, own.decoder = SPLITS[split], decoders.ByteLevel()
    own.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    own.save(str(folder / "tokenizer.json"))
    write(folder / "tokenizer_config.json", tokenizer_class=name or ..., pad_token=...)
    write(folder / "config.json", vocab_size=300, **({"model_type": "llama"} if name and "GPT2" in name else {}))
    read = read_tokenizer(folder)
    for text in (PROBE, "12345 + 123456", "a\n\n  b", "it's"):
        ids = read.encode(text, add_special_tokens=False)
        assert ids == own.encode(text, add_special_tokens=False).ids
        assert exact_text(ids, read) == text
    if split == "digits":
        assert len(read.encode("12345", add_special_tokens=False)) == 5


def test_one_that_cannot_be_read_as_written_is_refused(folder, monkeypatch):
    monkeypatch.setattr("hybrid_rl.model_folder.tokenizer._reads_as", lambda tokenizer, file: False)
    with pytest.raises(ModelError, match=r"model\.path=.*: transformers does not split text as tokenizer\.json says"):
        read_tokenizer(folder)


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
END, PAD = 257, 258  # of the embedded tokenizer


@pytest.mark.parametrize(
    ("template", "after", "ends"),
    [
        (CHATML, "<|im_end|>", {PAD, END}),
        ("{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %} \n<|im_end|>{% endif %}{% endfor %}", " \n<|im_end|>", {PAD, END}),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}", "<|pad|>", {PAD}),
        ("{% for m in messages %}{{ m.content }}\n### {% endfor %}", "<|pad|>", {PAD}),  # no control token: the end token ends it
        ("{{ messages[0].content }}", "<|pad|>", {PAD}),  # answers are not shown at all
        ("{{ raise_exception('one message only') if messages | length > 1 }}{{ messages[0].content }}", "<|pad|>", {PAD}),
    ],
)  # fmt: skip
def test_a_turn_ends_as_the_chat_template_ends_one(folder, template, after, ends):
    """The tokenizer's end token is another one than the chat's, as in many base models."""
    write(folder / "tokenizer_config.json", eos_token="<|pad|>", pad_token=...)
    write(folder / "generation_config.json", eos_token_id=PAD)
    (folder / "chat_template.jinja").write_text(template)
    policy = Policy.load(folder, CPU)
    assert closing(policy.tokenizer) == after
    assert policy.end_ids() == ends
    answer = demonstration(TASK, policy.tokenizer, 100)
    taught = policy.tokenizer.decode(answer.token_ids[answer.prompt_length :])
    assert taught == f"ab{after}"
    assert answer.token_ids[-1] in ends
    sets = TaskSets([TASK], [], [])
    check_prompts(sets, policy.tokenizer, 300, Limits(100, len(answer.token_ids)), sft=True)
    with pytest.raises(ValueError, match="raise it or drop the task"):
        check_prompts(sets, policy.tokenizer, 300, Limits(100, len(answer.token_ids) - 1), sft=True)


def test_ends_beyond_the_vocabulary_that_only_the_generation_config_names_do_no_harm(folder):
    write(folder / "generation_config.json", eos_token_id=[5, 100_000])
    assert Policy.load(folder, CPU).end_ids() == {5, END}


def test_a_reward_sees_all_but_the_end_and_padding(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = True  # the tags among them
    (folder / "tokenizer.json").write_text(json.dumps(content))
    write(folder / "tokenizer_config.json", clean_up_tokenization_spaces=True)
    read = read_tokenizer(folder)
    text = "<reversed_text>a , b .</reversed_text><|im_start|> it 's"
    ids = read.encode(text, add_special_tokens=False)
    assert completion_text([*ids, END], read, stopped=True) == text
    assert completion_text([*ids, PAD], read) == text
    assert completion_text([*ids, END, 65], read) == f"{text}<|im_end|>b"  # not where it stopped
    assert AutoTokenizer.from_pretrained(folder).decode(ids, skip_special_tokens=True) != text


def test_a_tokenizer_that_panics_on_any_text_is_one_line(folder, capfd):
    """Its regular expression tries every way to split; what the tokenizers library raises then is no Exception."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    split = pre_tokenizers.Split(Regex(r"(.+.+)+(?!.)(?=.)"), "isolated")
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, own])
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(ModelError) as raised:
        read_tokenizer(folder)
    assert str(raised.value).startswith(f"model.path={folder}: its tokenizer ended with PanicException: ")
    assert "\n" not in str(raised.value)
    assert capfd.readouterr().err == ""
