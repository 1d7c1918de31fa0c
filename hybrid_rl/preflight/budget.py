"""Compute the memory and disk space that a run needs, and check them before the model loads."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hybrid_rl.algo.declared import needs
from hybrid_rl.attention.attend import configured_windows
from hybrid_rl.config import Config, EngineKind, Offload, Reference, only_evaluates
from hybrid_rl.engine.make import choose_engine
from hybrid_rl.machine import free_memory
from hybrid_rl.model_folder.read import ModelError, check_stored, empty_model, read_config, reason
from hybrid_rl.policy import lora
from hybrid_rl.policy.defaults import activation_bytes, compute_dtype, logit_elements, row_tokens
from hybrid_rl.policy.positions import Limit, limits
from hybrid_rl.processes.ranks import Ranks

GUESSED = ("KV cache", "activations", "logits")  # rules of thumb, or made smaller if memory is short


class BudgetError(RuntimeError):
    """The machine has less free memory, or the disk less free space, than the run needs."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of parameters: of the policy, of its trained part, and of each other model (reference, teacher, critic).

    `limits` holds, by setting, the limits of each model on the length of a sample.
    """

    model: PreTrainedConfig
    parameters: int
    trainable: int
    beside: dict[str, int]
    limits: dict[str, list[Limit]] = field(default_factory=dict)


def measure(config: Config, folder: str | Path) -> Sizes:
    """Return the sizes of a run's models without allocating parameters. Raises ModelError for a bad folder."""
    model = _empty("model.path", str(folder))
    known = {_named(config): limits(model)}
    parameters = sum(p.numel() for p in model.parameters())
    try:
        lora.inject(model, config.policy.lora)
    except ValueError as error:
        raise ModelError(str(error)) from error
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    beside = models_beside(config, parameters)
    others = {"teacher": ("algo.teacher", config.algo.teacher), "critic": ("algo.critic.path", config.algo.critic.path)}
    for setting, path in (others[role] for role in beside if role in others):
        if path:
            known[f"{setting}={path}"] = limits(_empty(setting, path))
    return Sizes(model.config, parameters, trainable, beside, known)


def _named(config: Config) -> str:
    """Return the setting that the policy's folder comes from, with its value."""
    return (
        f"model.path={config.model.path}"
        if config.model.path
        else f"model.tiny.max_positions={config.model.tiny.max_positions}"
    )


def check_lengths(config: Config, sizes: Sizes, demonstration: int) -> list[str]:
    """Return notes about samples that are longer than a model was trained for.

    `demonstration` is the length of the longest demonstration in tokens, 0 without SFT. Raises ModelError if a model
    cannot compute the longest sample of the run.
    """
    r, notes = config.rollout, []
    longest = r.max_prompt_tokens + r.max_tokens
    sampled = f"rollout.max_prompt_tokens={r.max_prompt_tokens} + rollout.max_tokens={r.max_tokens} = {longest}"
    for setting, known in sizes.limits.items():
        lengths = [(longest, sampled, "make them smaller")]
        if setting == _named(config):
            lengths.append((demonstration, f"the longest demonstration has {demonstration}", "drop the longer ones"))
        for limit in known:
            for length, cause, remedy in lengths:
                if length > limit.tokens:
                    line = f"{setting} {limit.reason}, and {cause}"
                    if limit.hard:
                        raise ModelError(f"{line}; {remedy}")
                    notes.append(line)
    return notes


def check_budget(config: Config, sizes: Sizes, device: torch.device, ranks: Ranks, folder: Path) -> None:
    """Raise BudgetError if a phase certainly needs more than the free memory, or checkpoints more than free disk."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory() / ranks.local_world
    certain = {
        phase: {name: gib for name, gib in items.items() if name not in GUESSED and gib}
        for phase, items in memory_by_phase(config, sizes, device, ranks).items()
    }
    if not config.sft.steps and not config.rl.steps:  # evaluations alone
        certain = {"sampling": {name: gib for name, gib in certain["sampling"].items() if name != "Adam moments"}}
    phase, items = max(certain.items(), key=lambda found: sum(found[1].values()))
    if sum(items.values()) > free / 2**30:
        what = ", ".join(f"{name} {gib:.1f}" for name, gib in items.items())
        offload = ", or policy.offload=optimizer" if phase == "sampling" else ""
        raise BudgetError(
            f"{phase} takes at least {sum(items.values()):.1f} GiB a rank ({what}), and {free / 2**30:.1f} GiB are "
            f"free; use a smaller model, more ranks, policy.lora.rank=16{offload} (docs/gpus.md)"
        )
    there = next(f for f in (folder, *folder.absolute().parents) if f.is_dir())
    old = sum(f.stat().st_size for f in folder.glob("checkpoints/**/*") if f.is_file())
    missing, left = disk_bytes(config, sizes) - old, shutil.disk_usage(there).free
    if missing > left:
        raise BudgetError(
            f"checkpoints and the exported model take {missing / 2**30:.1f} GiB, and {left / 2**30:.1f} GiB are free "
            f"in {there}; free disk space, choose another disk with output_dir, or keep fewer than "
            f"rl.keep_checkpoints={config.rl.keep_checkpoints}"
        )


def disk_bytes(config: Config, sizes: Sizes) -> int:
    """Return the bytes of the largest set of checkpoints at a time, the frozen reference and the exported models.

    Checkpoints hold float32 parameters with moments. Rollouts are not included: see rollout_bytes.
    """
    if only_evaluates(config):
        return 4 * sizes.parameters * (config.model.path is None)
    rl, sft, trained = config.rl, config.sft, sizes.trainable + sizes.beside.get("critic", 0)
    kept = rl.keep_checkpoints + 1  # an old one goes when the next is complete
    in_sft = math.ceil(sft.steps / sft.checkpoint_every) if sft.checkpoint_every else 0
    in_rl = math.ceil(rl.steps / rl.checkpoint_every)
    # 12 bytes a parameter with moments; the checkpoint at the beginning of RL has none: 4
    most = 12 * kept if max(in_sft, in_rl) >= kept else 12 * min(in_sft + in_rl, kept - 1) + 4
    most += 12 * rl.keep_best
    reference = sizes.trainable if config.algo.reference == Reference.frozen else 0
    return most * trained + 4 * (reference + sizes.parameters * (1 + (config.model.path is None)))


def later_bytes(config: Config, trainable: int) -> int:
    """Return the bytes of a rank's GPU that the trainer allocates after the engine is made, and holds while it samples.

    These are Adam's moments of the rank's `trainable` parameters, unless they are offloaded, and three buckets of the
    handover: the one that is gathered, its flat copy, and the copy before it, which the engine may let go of late.
    """
    moments = 8 * trainable if config.policy.offload == Offload.none else 0
    return moments + 3 * config.handover.bucket_mib * 2**20


# bytes of a sampled token in a rollouts file: id, log-probability, log-ratio, entropy and text, compressed; prompts are
# small, one a group
BYTES_A_TOKEN = 14


def rollout_bytes(config: Config, held_out: int) -> int:
    """Return the bytes of the rollouts that stay on disk, if all completions have rollout.max_tokens.

    `held_out` is the number of held-out tasks. Replaced groups are not counted.
    """
    rl, r = config.rl, config.rollout
    kept = min(rl.steps, r.keep_steps + 1) if r.keep_steps else rl.steps
    evaluations = 1 + bool(config.sft.steps) + bool(rl.steps) + (kept // rl.eval_every if rl.eval_every else 0)
    tasks = min(held_out, config.eval.max_tasks or held_out)
    return BYTES_A_TOKEN * r.max_tokens * (kept * r.batch_size + evaluations * tasks * config.eval.samples)


def models_beside(config: Config, parameters: int) -> dict[str, int]:
    """Return the number of parameters of each model that `algo` needs beside the policy.

    `parameters` is the policy's number. Raises ModelError for a bad folder.
    """
    algo, wanted = config.algo, needs(config.algo.advantage)
    found: dict[str, int] = {}
    if algo.reference == Reference.frozen:
        found["reference"] = parameters
    if "teacher_logprobs" in wanted and algo.teacher:
        found["teacher"] = sum(p.numel() for p in _empty("algo.teacher", algo.teacher).parameters())
    if "values" in wanted:
        path = algo.critic.path
        found["critic"] = sum(p.numel() for p in _empty("algo.critic.path", path).parameters()) if path else parameters
    return found


def _empty(setting: str, folder: str) -> PreTrainedModel:
    """Return the folder's model without memory for its parameters. Raises ModelError with the setting's name."""
    try:
        model = empty_model(read_config(folder))
        configured_windows(model.config)
        check_stored(folder, model)
        return model
    except ModelError as error:
        raise ModelError(str(error).replace("model.path=", f"{setting}=")) from error
    except ValueError as error:  # not a causal LM, or layers that are not supported
        raise ModelError(f"{setting}={folder} cannot be loaded: {reason(error)}") from error


def memory_by_phase(config: Config, sizes: Sizes, device: torch.device, ranks: Ranks) -> dict[str, dict[str, float]]:
    """Return the GiB that one rank holds in each phase, by item; computed, not measured (docs/gpus.md has the table).

    Of reference, teacher and critic, one computes at a time; on a GPU the idle ones are in host memory, except the
    critic, which stays while the policy trains. Activations are a rule of thumb.
    """
    text, policy = sizes.model.get_text_config(), config.policy
    parameters, trainable = sizes.parameters, sizes.trainable
    dtype = compute_dtype(policy.dtype, device)
    size, sharded = dtype.itemsize, ranks.world > 1 or dtype != torch.float32
    share = (policy.shard or ranks.local_world) if sharded else 1
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    kv_tokens = config.engine.slots * (config.rollout.max_prompt_tokens + config.rollout.max_tokens)
    # with the head the largest FSDP unit, and unsharded during the whole backward
    embeddings = text.vocab_size * text.hidden_size
    layer, row = (parameters - embeddings) / text.num_hidden_layers, row_tokens(policy, text, device)
    stays = lambda what: 0 if policy.offload in what else 1  # noqa: E731
    critic = sizes.beside.get("critic", 0)
    scorers = {name: count for name, count in sizes.beside.items() if name != "critic"}
    critic_stays = stays([Offload.all]) if ranks.world > 1 else 1
    on_gpu = device.type == "cuda"
    of_sglang = choose_engine(config.engine.kind, device) == EngineKind.sglang
    team = config.engine.tensor_parallel if of_sglang else 1
    in_bytes = {
        "sampling": {
            "parameters": 4 * parameters / share * (stays([Offload.all]) if sharded else 1),
            "whole weights": size * parameters / team if sharded or of_sglang else 0,
            "Adam moments": 8 * trainable / share * stays([Offload.optimizer, Offload.all]),
            "critic": (4 * critic_stays + 8 * stays([Offload.optimizer, Offload.all])) * critic / share * (not on_gpu),
            "KV cache": 2 * text.num_hidden_layers * kv_heads * head_dim * kv_tokens * size,
        },
        "training": {
            "parameters": 4 * parameters / share,
            "units whole": size * (embeddings + 2 * layer) if sharded else 0,
            **({} if on_gpu else {name: 4 * count / share for name, count in scorers.items()}),
            "critic": 12 * critic / share,
            "gradients": 4 * max(trainable, critic) / share,  # policy and critic train one after the other
            "Adam moments": 8 * trainable / share,
            "activations": activation_bytes(policy, text, dtype) * row,
            "logits": 3 * 4 * min(logit_elements(device), row * text.vocab_size),
        },
    }
    if scorers and on_gpu:  # they score one at a time, before gradients exist
        name, count = max(scorers.items(), key=lambda item: item[1])
        there = {key: value for key, value in in_bytes["training"].items() if key not in ("gradients", "activations")}
        in_bytes["scoring"] = there | {name: 4 * count / share}
    return {phase: {name: value / 2**30 for name, value in items.items()} for phase, items in in_bytes.items()}
