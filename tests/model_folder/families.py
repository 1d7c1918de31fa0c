"""Tiny random models of many families, and what hybrid_rl does with each: `python -m tests.model_folder.families` writes docs/families.md."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hybrid_rl.config import LayoutKind, LoraConfig, PolicyConfig, Precision
from hybrid_rl.engine.base import Request, Sampling
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.handover import hand_over
from hybrid_rl.model_folder.read import ModelError, stored_names
from hybrid_rl.policy import tiny
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.update import score
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.types import Rollout

CPU = torch.device("cpu")
PAGE = Path(__file__).parents[2] / "docs" / "families.md"
CLOSE = 1e-5  # of two log-probabilities
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}

# model_type: what differs from SHAPE
FAMILIES: dict[str, dict] = {
    "llama": {}, "mistral": {"sliding_window": None}, "ministral3": {}, "mixtral": EXPERTS, "qwen2": {}, "qwen3": {"head_dim": 8},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 16}, "qwen3_moe": EXPERTS | {"head_dim": 8, "mlp_only_layers": [0]},
    "gemma": {"head_dim": 8}, "gemma2": {"head_dim": 8}, "gemma3_text": {"head_dim": 8}, "phi": {}, "phi3": {"resid_pdrop": 0.02},
    "phimoe": EXPERTS, "gpt2": {}, "gpt_neo": {"attention_types": [[["global", "local"], 1]]}, "gpt_neox": {}, "gpt_bigcode": {},
    "gptj": {"rotary_dim": 4}, "codegen": {"rotary_dim": 4}, "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32}, "bloom": {}, "falcon": {},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2}, "stablelm": {}, "starcoder2": {"sliding_window": None}, "olmo": {}, "olmo2": {},
    "olmo3": {}, "olmoe": EXPERTS, "cohere": {}, "cohere2": {}, "granite": {}, "granitemoe": EXPERTS, "granitemoeshared": EXPERTS,
    "smollm3": {}, "glm": {"head_dim": 8}, "glm4": {"head_dim": 8}, "glm4_moe": EXPERTS | {"first_k_dense_replace": 1, "n_group": 1},
    "ernie4_5": {"head_dim": 8}, "ernie4_5_moe": EXPERTS | {"moe_num_experts": 4, "moe_k": 2}, "helium": {"head_dim": 8}, "exaone4": {},
    "nemotron": {}, "persimmon": {}, "deepseek_v2": EXPERTS | LATENT | {"n_group": 1, "topk_group": 1},
    "deepseek_v3": EXPERTS | LATENT | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}, "seed_oss": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8}, "arcee": {}, "apertus": {}, "bitnet": {}, "minimax_m2": EXPERTS | {"head_dim": 8},
    "gpt_oss": EXPERTS | {"head_dim": 8}, "lfm2": {"full_attn_idxs": [1]}, "openai-gpt": {}, "ctrl": {"dff": 64}, "biogpt": {},
    "mamba": {}, "rwkv": {},
}  # fmt: skip
SHAPE = {
    "vocab_size": 263, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    family: str
    runs: str  # "yes", or the line that refuses it
    adapters: str = ""  # likewise

    def row(self) -> str:
        return f"| `{self.family}` | {self.runs} | {self.adapters} |"


def build(family: str, folder: Path) -> None:
    """Save a random model with the embedded model's tokenizer."""
    tokenizer = tiny.character_tokenizer(["<w>"] * 1)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SHAPE | ids | FAMILIES[family])))
    with torch.no_grad():  # biases start at 0 and norms at 1, where a mistake in them would not show
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and (tensor.dim() == 1 or "bias" in name):
                tensor.add_(0.1 * torch.randn(tensor.shape))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def batch(policy: Policy) -> tuple[list[Rollout], Tensor]:
    """Rollouts sampled by the embedded engine, and the log-probabilities it recorded."""
    engine = LocalEngine(policy.sampler, policy.end_ids(), 4, 64, dtype=policy.dtype)
    hand_over(policy, engine, 1)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12], [13, 14]]
    requests = [Request(i, prompt, seed=i) for i, prompt in enumerate(prompts * 2)]
    done = sorted(engine.generate(requests, Sampling(1.0, 0, 1.0, 12)), key=lambda c: c.id)
    rollouts = []
    for c in done:
        rollouts.append(Rollout(f"t{c.id}", c.id, 0, 0, list(requests[c.id].prompt_ids)))
        rollouts[-1].add_sampled(c.token_ids, c.logprobs, c.versions)
    return rollouts, torch.tensor([x for c in done for x in c.logprobs])


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, rollouts: list[Rollout]) -> Tensor:
    """The same by plain transformers, one sample at a time."""
    found = []
    for r in rollouts:
        logprobs = (
            model.eval()(input_ids=torch.tensor([r.token_ids]), use_cache=False).logits[0, :-1].float().log_softmax(-1)
        )
        taken = logprobs.gather(-1, torch.tensor(r.token_ids)[1:, None])[:, 0]
        found.append(taken[torch.tensor(r.loss_mask).bool()[1:]])
    return torch.cat(found)


def close(what: str, ours: Tensor, theirs: Tensor) -> None:
    off = float((ours - theirs).abs().max())
    assert off < CLOSE * max(1.0, float(theirs.abs().max())), f"{what}: {off:.1e} nats off"


def holds_the_files_tensors(policy: Policy, folder: Path, exact: bool = True) -> None:
    """Every rank calls; rank 0 compares."""
    whole = policy._on_main(policy.buckets(torch.float32 if exact else policy.dtype, 2**28))
    if policy.ranks.main:
        held, file = (
            stored_names(policy._skeleton(), whole, policy._conversions),
            load_file(folder / "model.safetensors"),
        )
        assert held.keys() >= file.keys()
        for name, tensor in file.items():
            assert torch.equal(held[name], tensor.to(held[name].dtype)), name


def same_folder(folder: Path, out: Path) -> None:
    """All but the weights is the source's, byte for byte; the weights have its names, shapes and dtypes."""
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            assert (out / file.name).read_bytes() == file.read_bytes(), file.name
    ours, theirs = (load_file(f / "model.safetensors") for f in (out, folder))
    assert {n: (t.shape, t.dtype) for n, t in ours.items()} == {n: (t.shape, t.dtype) for n, t in theirs.items()}


@torch.no_grad()
def move(policy: Policy) -> None:
    """Change every trained weight."""
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.trainable.values():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def examine(family: str, folder: Path) -> Found:
    """Put one family through everything that one rank in float32 does. Raises AssertionError where a number is wrong."""
    build(family, folder)
    try:
        policy = Policy.load(folder, CPU)
    except ModelError as error:
        return Found(family, _line(error, folder))
    holds_the_files_tensors(policy, folder)
    rollouts, recorded = batch(policy)
    for layout in ("trees", "packed", "padded"):
        policy.settings.layout = LayoutKind(layout)
        close(f"trainer and engine, {layout}", score(policy, rollouts, 1.0), recorded)
    policy.settings.layout = LayoutKind.auto
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    close("trainer and plain transformers", recorded, plain_logprobs(plain, rollouts))
    out = folder.with_name(f"{folder.name}_out")
    move(policy)
    policy.export(out)
    moved = score(policy, rollouts, 1.0)
    assert (moved - recorded).abs().max() > 1e-3
    close(
        "export and policy",
        plain_logprobs(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32), rollouts),
        moved,
    )
    same_folder(folder, out)
    return Found(family, "yes", _adapters(folder, rollouts))


def _adapters(folder: Path, rollouts: list[Rollout]) -> str:
    from peft import PeftModel

    try:
        policy = Policy.load(folder, CPU, PolicyConfig(lora=LoraConfig(rank=2, alpha=4)))
    except ModelError as error:
        return _line(error, folder)
    move(policy)
    out = folder.with_name(f"{folder.name}_merged")
    policy.export(out)
    ours = score(policy, rollouts, 1.0)
    close(
        "merged and policy",
        plain_logprobs(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32), rollouts),
        ours,
    )
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (ours - plain_logprobs(base, rollouts)).abs().max() > 1e-3
    close("adapter and policy", plain_logprobs(PeftModel.from_pretrained(base, f"{out}_adapter"), rollouts), ours)
    same_folder(folder, out)
    names = {name.split(".lora_A")[0].rpartition(".")[2] for name in policy.trainable if ".lora_A" in name}
    return ", ".join(f"`{name}`" for name in sorted(names))


def _line(error: ModelError, folder: Path) -> str:
    return (
        str(error)
        .replace(f"model.path={folder}", "model.path")
        .replace(f"{folder}: ", "")
        .replace(str(folder), "the folder")
    )


def load_everywhere(ranks: Ranks, folders: list[Path], dtype: Precision) -> None:
    """Each rank of several, or one that computes in half precision."""
    for folder in folders:
        policy = Policy.load(folder, CPU, PolicyConfig(dtype=dtype), ranks)
        holds_the_files_tensors(policy, folder, exact=False)
        rollouts, recorded = batch(policy)
        policy.reshard()
        off = (score(policy, rollouts, 1.0) - recorded).abs().max()
        assert off < (CLOSE * 10 if dtype == Precision.float32 else 1.0), f"{folder.name}: {off:.1e} nats off"


def page(found: list[Found]) -> str:
    text = (
        "# Model families\n\nWhat hybrid_rl does with a tiny random model of each family of transformers "
        f"{transformers.__version__}. `yes`: the loaded tensors are the file's, trainer, engine and plain transformers agree on every\n"
        f"log-probability within {CLOSE:g}, an export read by plain transformers is the policy, and so are the merged and the separate adapter.\n"
        "Otherwise the line that ends the run before anything is trained. `python -m tests.model_folder.families` writes this page.\n\n"
        "| family (`model_type`) | runs | modules that get adapters (`policy.lora.targets=[all-linear]`) |\n|---|---|---|\n"
    )
    return text + "".join(f"{f.row()}\n" for f in found)


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    chosen, found = sys.argv[1:] or list(FAMILIES), []
    for family in chosen:
        with TemporaryDirectory() as folder:
            try:
                found.append(examine(family, Path(folder) / "model"))
            except Exception as error:
                print(f"{family}: {type(error).__name__}: {error}")
                continue
            print(found[-1].row())
    if not sys.argv[1:]:
        PAGE.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
