"""Model folders and their tokenizers: what is wrong with one is said before anything is trained, and no code of theirs is run."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_rl import session
from hybrid_rl.config import ConfigError
from hybrid_rl.data.render import prompt_ids
from hybrid_rl.model_folder.read import ModelError
from hybrid_rl.model_folder.tokenizer import read_tokenizer
from hybrid_rl.policy.model import Policy
from hybrid_rl.preflight.settings import load
from hybrid_rl.types import Task
from tests.bad_inputs.conftest import SMALL


def rewrite(file, **changes):
    """Change keys of a JSON file; those set to ... go."""
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def config(**changes):
    return lambda folder: rewrite(folder / "config.json", **changes)


def tokenizer(**changes):
    return lambda folder: rewrite(folder / "tokenizer_config.json", **changes)


def content(file, data):
    return lambda folder: (folder / file).write_bytes(data)


def without(pattern):
    return lambda folder: [file.unlink() for file in folder.glob(pattern)]


def weights(change):
    def rewritten(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return rewritten


def cut(size):
    return lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:size])


def pickled(folder):
    """What transformers would fall back to, beside weights of another kind that satisfy a first look."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


def code(file, **auto_map):
    """A folder whose own Python code would end the test if it were run."""

    def change(folder):
        rewrite(
            folder / file,
            auto_map=auto_map,
            **({"model_type": "own"} if file == "config.json" else {"tokenizer_class": "Own"}),
        )
        (folder / "own.py").write_text("raise SystemExit('code of a model folder was run')")

    return change


def both(*changes):
    return lambda folder: [change(folder) for change in changes]


ROOM = ["rollout.max_prompt_tokens=200", "data.max_length=12"]  # few tasks, whose prompts fit
NO_CODE = "cannot be loaded: it needs Python code from the folder (auto_map), which is never run; use a model that transformers implements itself"
NOT_JSON = (
    "generation_config.json is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
)
START = "<|im_start|>"
NO_END = content("chat_template.jinja", b"{% for m in messages %}{{ m.content }}{% endfor %}")

# name: what is done to a good folder → what the line contains; {} is the folder
FOLDERS = {
    "no config": (without("config.json"), "model.path={} (command line): is not a Hugging Face model folder on this disk (one with a config.json); set model.path=/path/to/the/folder"),
    "no weights": (without("*.safetensors"), "model.path={} (command line): has no *.safetensors file; convert its weights, which are read in that format only"),
    "broken config": (content("config.json", b'{"model_type": "qwen3",'), "It looks like the config file at '{}/config.json' is not a valid JSON file."),
    "config a list": (content("config.json", b"[]"), "model.path={} cannot be loaded: Unrecognized model in {}. Should have a `model_type` key in its config.json."),
    "config empty": (content("config.json", b"{}"), "model.path={} cannot be loaded: Unrecognized model in {}. Should have a `model_type` key in its config.json."),
    "config of wrong types": (config(hidden_size="many"), "Field 'hidden_size' expected int, got str (value: 'many')"),
    "unknown architecture": (config(model_type="unheard_of"), "cannot be loaded: The checkpoint you are trying to load has model type `unheard_of` but Transformers does not recognize this architecture."),
    "not a causal LM": (config(model_type="t5"), "cannot be loaded: Unrecognized configuration class <class 'transformers.models.t5.configuration_t5.T5Config'> for this kind of AutoModel: AutoModelForCausalLM."),
    "weights elsewhere": (both(without("model.safetensors"), content("other.safetensors", b"")), "model.path={} cannot be loaded: it has neither model.safetensors nor model.safetensors.index.json"),
    "an index without its files": (both(without("model.safetensors"), content("a.safetensors", b""), content("model.safetensors.index.json", b'{"metadata": {}, "weight_map": {"model.norm.weight": "b.safetensors"}}')), "cannot be loaded: No such file or directory: {}/b.safetensors"),
    "pickle": (pickled, "cannot be loaded: it has neither model.safetensors nor model.safetensors.index.json"),
    "a weight missing": (weights(lambda w: w.pop("model.norm.weight")), "model.path={} has no weights for model.norm.weight"),
    "a weight too many": (weights(lambda w: w.update({"model.layers.7.mlp.up_proj.weight": torch.zeros(2)})), "model.path={} has weights that config.json has no place for: model.layers.7.mlp.up_proj.weight"),
    "a layer fewer in config": (config(num_hidden_layers=1, layer_types=["full_attention"]), "model.path={} has weights that config.json has no place for: model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, model.layers.1.mlp.gate_proj.weight …"),
    "another shape": (weights(lambda w: w.update({"model.norm.weight": torch.zeros(33)})), "model.path={}: model.norm.weight has shape [33], by config.json it must have [32]"),
    "NaN": (weights(lambda w: w["model.norm.weight"].fill_(float("nan"))), "its logits are not finite; a weight is NaN or infinite"),
    "cut off": (cut(9000), "model.path={} cannot be loaded: a *.safetensors file is damaged or incomplete, copy it again ("),
    "cut off in the header": (cut(5), "model.path={} cannot be loaded: a *.safetensors file is damaged or incomplete, copy it again ("),
    "empty weights": (cut(0), "model.path={} cannot be loaded: a *.safetensors file is damaged or incomplete, copy it again ("),
    "quantised": (config(quantization_config={"quant_method": "gptq", "bits": 4}), "model.path={} has quantised weights (gptq), which cannot be trained; use the model's unquantised folder"),
    "another kind of layer": (config(layer_types=["full_attention", "linear_attention"]), "model.path={} cannot be loaded: it has layers of linear_attention; only full_attention and sliding_attention are supported"),
    "positions that follow a row": (config(max_position_embeddings=16, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}), "model.path={} moves all positions of a row when its longest sample has more than 16 tokens (rope_type dynamic, max_position_embeddings), and rollout.max_prompt_tokens=200 + "),
    "code for the model": (code("config.json", AutoConfig="own.Config", AutoModelForCausalLM="own.Model"), f"model.path={{}} {NO_CODE}"),
    "broken generation config": (content("generation_config.json", b"{"), f"model.path={{}}: {NOT_JSON}"),
    "no tokenizer": (without("tok*"), "model.path={} has no tokenizer; copy its tokenizer.json and tokenizer_config.json into the folder"),
    "broken tokenizer": (content("tokenizer.json", b"{"), "model.path={}: its tokenizer cannot be loaded: "),
    "a tokenizer of another kind": (content("tokenizer.json", b"{}"), "model.path={}: its tokenizer cannot be loaded: KeyError: 'added_tokens'"),
    "broken tokenizer config": (content("tokenizer_config.json", b"{"), "model.path={}: its tokenizer cannot be loaded: "),
    "more base tokens than the model": (both(config(vocab_size=100), weights(lambda w: w.update({"model.embed_tokens.weight": w["model.embed_tokens.weight"][:100].clone()}))), "model.path={}: the tokenizer has 256 tokens and the model 100; use the tokenizer that belongs to the model"),
    "marks that the model does not know": (both(config(vocab_size=258), weights(lambda w: w.update({"model.embed_tokens.weight": w["model.embed_tokens.weight"][:258].clone()}))), "the tokenizer gives token 262, the model knows 258; they do not belong together"),
    "no chat template": (without("chat_template.jinja"), "model.path={}: the tokenizer has no chat template; add chat_template.jinja to the folder"),
    "empty chat template": (content("chat_template.jinja", b""), "its prompt has no tokens; the tokenizer's chat template makes nothing of its messages"),
    "broken chat template": (content("chat_template.jinja", b"{% for m in %}"), "the tokenizer's chat template does not take its messages: Expected an expression, got 'end of statement block'"),
    "a template that raises": (content("chat_template.jinja", b"{{ raise_exception('No system message, please') }}"), "the tokenizer's chat template does not take its messages: No system message, please"),
    "a template that fails": (content("chat_template.jinja", b"{{ messages[0].content + 1 }}"), "the tokenizer's chat template does not take its messages: can only concatenate str (not \"int\") to str"),
    "a template that looks into Python": (content("chat_template.jinja", b"{{ messages.__class__.__mro__ }}"), "the tokenizer's chat template does not take its messages: access to attribute '__class__' of 'list' object is unsafe."),
    "two start tokens": (both(tokenizer(bos_token=START), content("chat_template.jinja", b"{{ bos_token }}{{ bos_token }}hello")), "its prompt begins with the start token (bos) twice; take one out of the tokenizer's chat template"),
    "no end token": (both(tokenizer(eos_token=...), NO_END, config(eos_token_id=None), lambda f: rewrite(f / "generation_config.json", eos_token_id=...)), "model.path={}: no end token is named by its generation config, tokenizer or chat template; name eos_token in tokenizer_config.json"),
    "an end token beyond the model": (both(config(vocab_size=257), weights(lambda w: w.update({"model.embed_tokens.weight": w["model.embed_tokens.weight"][:257].clone()}))), "model.path={}: the end token <|im_end|> has the id 257, and the model knows 257 tokens; name another eos_token in tokenizer_config.json, or use the tokenizer that belongs to the model"),
    "tied, and two tensors": (weights(lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"] + 1})), "model.path={}: by config.json lm_head.weight is model.embed_tokens.weight (tie_word_embeddings), but the files hold two different tensors; set tie_word_embeddings=false in config.json to use both, or remove lm_head.weight from model.safetensors"),
}  # fmt: skip


@pytest.fixture
def folder(tiny_folder, tmp_path):
    return shutil.copytree(tiny_folder, tmp_path / "model")


@pytest.mark.parametrize("name", FOLDERS)
def test_bad_model_folder(name, folder, last_line):
    change, expected = FOLDERS[name]
    change(folder)
    if "(command line)" in expected:  # found among the settings, before torch loads
        with pytest.raises(ConfigError) as caught:
            load([*SMALL, f"model.path={folder}"])
        assert str(caught.value) == expected.format(folder)
    else:
        assert expected.format(*[folder] * 9) in last_line(f"model.path={folder}", *ROOM)


@pytest.mark.parametrize(
    "name",
    [
        "unknown architecture",
        "broken tokenizer",
        "code for the model",
        "quantised",
        "positions that follow a row",
        "another kind of layer",
        "a template that raises",
        "an end token beyond the model",
        "tied, and two tensors",
    ],
)
def test_a_dry_run_says_it_too(name, folder, last_line):
    change, expected = FOLDERS[name]
    change(folder)
    assert expected.format(*[folder] * 9) in last_line(f"model.path={folder}", "dry_run=true", *ROOM)


def test_code_for_a_tokenizer_is_not_run(folder):
    """Its tokenizer.json says all that is needed."""
    code("tokenizer_config.json", AutoTokenizer=["own.Tokenizer", None])(folder)
    assert Policy.load(folder, torch.device("cpu")).tokenizer.encode("ab", add_special_tokens=False) == [64, 65]


def test_sft_needs_the_tokenizers_end_token(folder, last_line):
    tokenizer(eos_token=...)(folder)
    NO_END(folder)
    line = last_line(f"model.path={folder}", "sft.steps=1", "sft.batch_size=1", *ROOM)
    assert line.startswith(
        "sft.steps: neither the chat template nor the tokenizer names a token that ends a demonstration; name eos_token"
    )


def test_a_tokenizer_without_a_pad_token_works(folder):
    tokenizer(pad_token=...)(folder)
    policy = Policy.load(folder, torch.device("cpu"))
    assert policy.tokenizer.pad_token_id is None
    assert prompt_ids(Task("t", ({"role": "user", "content": "hi"},), ""), policy.tokenizer, 20)


def test_one_start_token_where_template_and_tokenizer_both_bring_one(folder):
    tokenizer(bos_token=START)(folder)
    file = folder / "tokenizer.json"
    single = [{"SpecialToken": {"id": START, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {START: {"id": START, "ids": [256], "tokens": [START]}}
    rewrite(
        file, post_processor={"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
    )
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    read = read_tokenizer(folder)
    assert read("ab")["input_ids"] == [256, 64, 65]
    assert prompt_ids(Task("t", ({"role": "user", "content": "ab"},), ""), read, 20) == [256, 64, 65]


def test_a_models_own_code_is_not_needed_where_transformers_has_the_model(folder):
    code("config.json", AutoConfig="own.Config", AutoModelForCausalLM="own.Model")(folder)
    config(model_type="qwen3")(folder)
    assert Policy.load(folder, torch.device("cpu")).parameter_count() > 0


def test_a_tokenizer_with_more_base_tokens_than_the_model(folder):
    config(vocab_size=100)(folder)
    weights(lambda w: w.update({"model.embed_tokens.weight": w["model.embed_tokens.weight"][:100].clone()}))(folder)
    with pytest.raises(
        ModelError, match="the tokenizer has 256 tokens and the model 100; use the tokenizer that belongs to the model"
    ):
        Policy.load(folder, torch.device("cpu"))


def test_a_prompt_or_demonstration_that_is_too_long_is_found_before_the_model_loads(tmp_path, last_line, monkeypatch):
    monkeypatch.setattr(session.Policy, "load", lambda *_, **__: pytest.fail("the model was loaded first"))
    row = {"prompt": "b", "answer": "1", "demonstration": "d" * 3000, "id": 7}
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({**row, "prompt": f"{i}", "id": i}) + "\n" for i in range(1500))
    )
    (tmp_path / "b.jsonl").write_text(json.dumps({**row, "prompt": "x" * 1_000_000}) + "\n")
    data = {"_target_": "hybrid_rl.data.files.load_tasks", "rl": "a.jsonl", "eval": "b.jsonl"}
    line = last_line("rollout.max_prompt_tokens=100", data=data)
    drop = "raise it or drop the task (data.drop_long=true drops all that are too long)"
    assert line == f"task eval/7: its prompt has 1000005 tokens, rollout.max_prompt_tokens=100; {drop}"
    (tmp_path / "b.jsonl").write_text(json.dumps(row) + "\n")
    line = last_line(
        "rollout.max_prompt_tokens=100",
        "sft.steps=1",
        "sft.batch_size=1",
        data={**data, "sft": "a.jsonl"},
        folder="other",
    )
    assert line == f"task sft/0: prompt and demonstration have 3007 tokens, policy.row_tokens=2048; {drop}"
