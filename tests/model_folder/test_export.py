"""Exports: the folder that the policy came from, with other numbers in it, for transformers of today and of before."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hybrid_rl.config import TinyConfig
from hybrid_rl.model_folder.read import ModelError
from hybrid_rl.policy import tiny
from hybrid_rl.policy.model import Policy
from tests.model_folder import families

CPU = torch.device("cpu")


@pytest.fixture
def folder(tiny_folder, tmp_path):
    return shutil.copytree(tiny_folder, tmp_path / "model")


def change(file: Path, drop: tuple[str, ...] = (), **keys: object) -> None:
    content = {k: v for k, v in json.loads(file.read_text()).items() if k not in drop} | keys
    file.write_text(json.dumps(content))


def published(folder: Path, **keys: object) -> None:
    """Write config.json as it was published for transformers 4: rotary settings at the top level, and the old name of the dtype."""
    change(folder / "config.json", ("rope_parameters", "dtype", "transformers_version"), torch_dtype="float32", **keys)


def test_everything_but_the_weights_is_the_sources(folder, tmp_path):
    published(folder, rope_theta=1000000.0, an_unknown_key=[1, {"a": None}])
    change(folder / "generation_config.json", temperature=0.6, top_p=0.95, do_sample=True)
    change(folder / "tokenizer_config.json", an_unknown_key="é", clean_up_tokenization_spaces=True)
    (folder / "README.md").write_text("the source's")
    (folder / "special_tokens_map.json").write_text("{}")
    for stale in ("pytorch_model.bin", "consolidated.safetensors", "adapter.gguf"):
        (folder / stale).write_bytes(b"weights of before")
    policy = Policy.load(folder, CPU)
    families.move(policy)
    policy.export(tmp_path / "out")
    kept = {file.name for file in folder.iterdir()} - {"pytorch_model.bin", "consolidated.safetensors", "adapter.gguf"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == kept
    for name in kept - {"model.safetensors"}:
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes(), name
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == policy.tokenizer.get_vocab()


def in_bfloat16(folder: Path) -> dict[str, torch.Tensor]:
    """Two files with an index, norms in float32, and a tensor that transformers passes over."""
    weights = {n: t if "norm" in n else t.bfloat16() for n, t in load_file(folder / "model.safetensors").items()}
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.arange(8.0)
    (folder / "model.safetensors").unlink()
    where = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(sorted(weights))}
    for file in set(where.values()):
        save_file({n: t for n, t in weights.items() if where[n] == file}, folder / file, {"format": "pt", "by": "them"})
    total = sum(t.nbytes for t in weights.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total, "x": 1}, "weight_map": where})
    )
    change(folder / "config.json", dtype="bfloat16")
    return weights


@pytest.mark.parametrize("float32", [False, True])
def test_files_names_and_dtypes_are_the_sources(folder, tmp_path, float32):
    weights, out = in_bfloat16(folder), tmp_path / "out"
    policy = Policy.load(folder, CPU)
    families.move(policy)
    policy.export(out, float32)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    written = {}
    for file in set(index["weight_map"].values()):
        with safe_open(out / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt", "by": "them"}
            assert all(index["weight_map"][name] == file for name in opened.keys())  # noqa: SIM118
        written |= load_file(out / file)
    assert {n: t.dtype for n, t in written.items()} == {
        n: torch.float32 if float32 else t.dtype for n, t in weights.items()
    }
    assert index["metadata"] == {"total_size": sum(t.nbytes for t in written.values()), "x": 1}
    assert json.loads((out / "config.json").read_text())["dtype"] == ("float32" if float32 else "bfloat16")
    for name, parameter in policy.parameters.items():
        assert torch.equal(written[name], parameter.to(written[name].dtype))
        assert not torch.equal(written[name], weights[name].to(written[name].dtype))
    assert torch.equal(written["model.layers.0.self_attn.rotary_emb.inv_freq"], torch.arange(8.0))
    assert Policy.load(out, CPU).parameter_count() == policy.parameter_count()


def test_a_weight_that_the_files_dtype_cannot_hold(folder, tmp_path):
    save_file(
        {n: t.half() for n, t in load_file(folder / "model.safetensors").items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    policy = Policy.load(folder, CPU)
    with torch.no_grad():
        policy.parameters["model.norm.weight"][3] = 1e6
    with pytest.raises(
        ModelError, match=r"^model\.norm\.weight has values that float16 cannot hold; set export\.dtype=float32$"
    ):
        policy.export(tmp_path / "out")
    policy.export(tmp_path / "whole", float32=True)


def test_equal_copies_of_a_tied_weight_stay_two(folder, tmp_path):
    weights = load_file(folder / "model.safetensors")
    save_file(
        weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    policy = Policy.load(folder, CPU)
    families.move(policy)
    policy.export(tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], policy.parameters["model.embed_tokens.weight"])
    assert torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])


# ---- an older transformers ----------------------------------------------------------------------------------------------

OLD = os.environ.get("OLD_TRANSFORMERS", "")  # a Python interpreter that has one; the Makefile makes it
ASK = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, __version__
assert __version__.startswith("4."), __version__
ids, found = torch.tensor([json.loads(sys.argv[1])]), []
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    found.append([logprobs.tolist(), AutoTokenizer.from_pretrained(folder).encode("In 2024, it's 5 <w>\\n", add_special_tokens=False)])
print(json.dumps(found))
"""
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
OLD_FAMILIES = {
    "qwen2": {"rope_theta": 1000000.0}, "llama": {"rope_theta": 500000.0, "rope_scaling": LLAMA3}, "qwen3": {"rope_theta": 1000000.0},
    "mixtral": {"rope_theta": 1000000.0}, "qwen3_moe": {"rope_theta": 1000000.0, "num_experts": 4}, "gpt_neox": {"rotary_emb_base": 20000, "rotary_pct": 0.25},
    "phi3": {"rope_theta": 5000.0}, "gpt2": {}, "gemma": {"rope_theta": 20000.0}, "olmo2": {"rope_theta": 500000.0},
}  # fmt: skip


def ask(*folders: Path) -> list:
    ids = json.dumps([5, 6, 7, 30, 31, 32, 60, 61, 62, 63] * 6)
    done = subprocess.run(
        [OLD, "-W", "ignore", "-c", ASK, ids, *map(str, folders)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@torch.no_grad()
def today(folder: Path) -> torch.Tensor:
    ids = torch.tensor([[5, 6, 7, 30, 31, 32, 60, 61, 62, 63] * 6])
    logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


@pytest.mark.slow
@pytest.mark.skipif(not OLD, reason="OLD_TRANSFORMERS names no Python with transformers 4; make test-all does")
def test_an_older_transformers_reads_the_export_as_this_one_does(tmp_path):
    folders = []
    for name, keys in OLD_FAMILIES.items():
        families.build(name, tmp_path / name)
        config = AutoConfig.from_pretrained(tmp_path / name)
        published(
            tmp_path / name,
            **({"intermediate_size": config.intermediate_size} if "intermediate_size" in config else {}),
            **keys,
        )
        change(tmp_path / name / "tokenizer_config.json", ("backend",), tokenizer_class="PreTrainedTokenizerFast")
        policy = Policy.load(tmp_path / name, CPU)
        families.move(policy)
        policy.export(tmp_path / f"{name}_out")
        folders += [tmp_path / name, tmp_path / f"{name}_out"]
    tiny.create(
        tmp_path / "tiny",
        TinyConfig(layers=2, hidden_size=32, intermediate_size=64, heads=4, head_dim=16, init_std=0.2),
        0,
    )
    policy = Policy.load(tmp_path / "tiny", CPU)
    families.move(policy)
    policy.export(tmp_path / "tiny_out")
    folders += [tmp_path / "tiny", tmp_path / "tiny_out"]
    for folder, (logprobs, pieces) in zip(folders, ask(*folders), strict=True):
        families.close(folder.name, torch.tensor(logprobs), today(folder))
        assert pieces == AutoTokenizer.from_pretrained(folder).encode("In 2024, it's 5 <w>\n", add_special_tokens=False)
