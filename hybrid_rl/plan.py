"""The dry run: load everything that is cheap, check it, and say what a run would do and how much memory it would take."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hybrid_rl.config import Config, EngineKind, Offload, Reference
from hybrid_rl.console import Console
from hybrid_rl.data import load_task_sets
from hybrid_rl.data.render import check_prompts, demonstration, marks_in, prompt_ids
from hybrid_rl.doctor import machine
from hybrid_rl.learner import needs
from hybrid_rl.policy import lora, tiny
from hybrid_rl.policy.layout import first_fit_decreasing
from hybrid_rl.policy.model import LOGIT_CHUNK_ELEMENTS, ModelError, compute_dtype, pick_device, read_config, read_tokenizer, reason
from hybrid_rl.ranks import Ranks
from hybrid_rl.rollout.reward import Scorer
from hybrid_rl.session import ENGINES, choose_engine, choose_layout


def print_plan(config: Config, console: Console, ranks: Ranks) -> None:
    """Raises the same errors a run would for a bad model folder, data set or reward."""
    device, r = pick_device(config.device), config.rollout
    wanted = r.batch_size // r.group_size
    tasks = load_task_sets(config.data, rl_tasks=wanted, sft_tasks=config.sft.batch_size if config.sft.steps else 0)
    with tempfile.TemporaryDirectory() as temporary:
        if not config.model.path:
            tiny.create(Path(temporary), config.model.tiny, config.seed)
        tokenizer = read_tokenizer(config.model.path or temporary)
        model = _empty("model.path", config.model.path or temporary)
    model_config, parameters = model.config, sum(p.numel() for p in model.parameters())
    lora.inject(model, config.policy.lora)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    check_prompts(
        tasks, tokenizer, model_config.get_text_config().vocab_size,
        max_tokens=r.max_prompt_tokens, row_tokens=config.policy.row_tokens, sft=bool(config.sft.steps),
    )  # fmt: skip
    prompts = [len(prompt_ids(task, tokenizer, r.max_prompt_tokens)) for task in [*tasks.rl, *tasks.eval]]
    scorer = Scorer(config.reward, 1, r.reward_timeout)
    try:
        scorer.check()
    finally:
        scorer.close()

    here = machine()
    console.heading(f"Plan for recipe {config.name} (nothing is trained)")
    console.say(f"machine    {here['cpu']}, {here['cores']} cores, {here['memory_gib']:.0f} GiB; {here['gpu'] or 'no GPU'}")
    compute = str(compute_dtype(config.policy.dtype, device)).removeprefix("torch.")
    console.say(f"ranks      {ranks.world} ({device.type}), compute {compute}, layout {choose_layout(config.policy.layout, device)}")
    engine = choose_engine(config.engine.kind, device)
    console.say(f"engine     {engine.value}: {ENGINES[engine]}, {config.engine.slots} completions at a time")
    console.say(
        f"model      {config.model.path or 'embedded tiny Qwen3'}: {parameters:,} parameters, vocabulary {model_config.vocab_size:,}"
    )
    console.say(
        f"tasks      {len(tasks.sft):,} SFT, {len(tasks.rl):,} RL, {len(tasks.eval):,} held out; prompts of {min(prompts)} to {max(prompts)} tokens"
    )
    if marks := marks_in(tasks, tokenizer):
        console.say(f"note       {marks}")
    prompt = statistics.fmean(prompts)
    if config.sft.steps:
        answers = [demonstration(task, tokenizer, r.max_prompt_tokens).sampled for task in tasks.sft[:1000]]
        console.say(
            f"SFT        {config.sft.steps} steps × {config.sft.batch_size} demonstrations of {statistics.fmean(answers):.0f} tokens, lr {config.sft.optimizer.lr:g}"
        )
        console.say(_batch_line("typical", config, prompt, statistics.fmean(answers)))
    console.say(_batch_line("at most", config, prompt, r.max_tokens))
    steps = config.algo.minibatches * config.algo.epochs
    updates = f"{steps} AdamW step{'s' * (steps > 1)} each"
    console.say(f"RL         {config.rl.steps} steps, {updates}, lr {config.rl.optimizer.lr:g}, temperature {r.temperature:g}")
    beside = models_beside(config, parameters)
    if beside:
        console.say("beside it  " + ", ".join(f"{name} of {count:,} parameters" for name, count in beside.items()))
    for line in _memory_lines(config, model_config, parameters, trainable, device, ranks, beside):
        console.say(line)


def models_beside(config: Config, parameters: int) -> dict[str, int]:
    """Parameters of each model that `algo` wants beside the policy, which has `parameters`. Raises ModelError for a bad folder."""
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
    """The folder's model without memory for its parameters."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(read_config(folder), trust_remote_code=False)
    except ModelError as error:
        raise ModelError(str(error).replace("model.path=", f"{setting}=")) from error
    except ValueError as error:  # a configuration of something that is no causal LM
        raise ModelError(f"{setting}={folder} cannot be loaded: {reason(error)}") from error


def _batch_line(label: str, config: Config, prompt: float, completion: float) -> str:
    """How a step's rollouts become rows, for completions of one length."""
    r, row = config.rollout, config.policy.row_tokens
    sample = round(prompt + completion)
    rows = len(first_fit_decreasing([sample] * r.batch_size, row))
    groups = r.batch_size // r.group_size
    tree = round(groups * prompt + r.batch_size * completion)
    return (
        f"{label:<11}{groups} tasks × {r.group_size} = {r.batch_size} rollouts of {sample} tokens = {r.batch_size * sample:,} tokens "
        f"→ {rows} rows of {row:,} ({row // sample} samples a row); as group trees {tree:,} tokens"
    )


def _memory_lines(
    config: Config, model: PreTrainedConfig, parameters: int, trainable: int, device: torch.device, ranks: Ranks, beside: Mapping[str, int],
) -> list[str]:  # fmt: skip
    lines: list[str] = []
    for phase, items in memory_by_phase(config, model, parameters, trainable, device, ranks, beside).items():
        what = " + ".join(f"{name} {gib:.2f}" for name, gib in items.items() if gib >= 0.005)
        lines.append(f"{'memory' if not lines else '':<11}{phase}: {sum(items.values()):.2f} GiB a rank ({what})")
    return lines


def memory_by_phase(
    config: Config, model: PreTrainedConfig, parameters: int, trainable: int, device: torch.device, ranks: Ranks,
    beside: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, dict[str, float]]:  # fmt: skip
    """GiB that one rank holds in each phase, by arithmetic and not measurement (docs/memory.md has the table).

    `beside` has the parameters of reference, teacher and critic; one of them is idle while another computes, and on a GPU on the host then,
    but for the critic, which keeps its place while the policy learns. Activations are a rule of thumb: 34 values a token and hidden unit in each layer, or one where they are computed again.
    """
    text, policy = model.get_text_config(), config.policy
    dtype = compute_dtype(policy.dtype, device)
    size, sharded = dtype.itemsize, ranks.world > 1 or dtype != torch.float32
    share = (policy.shard or ranks.local_world) if sharded else 1
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    kv_tokens = config.engine.slots * (config.rollout.max_prompt_tokens + config.rollout.max_tokens)
    embeddings = text.vocab_size * text.hidden_size  # with the head the largest unit of FSDP, and whole during the whole backward
    layer, row = (parameters - embeddings) / text.num_hidden_layers, policy.row_tokens
    kept, again = (1, 34) if policy.activation_checkpointing else (34, 0)
    activations = (kept * text.num_hidden_layers + again) * text.hidden_size * row * size
    stays = lambda what: 0 if policy.offload in what else 1  # noqa: E731
    critic, scorers = beside.get("critic", 0), {name: count for name, count in beside.items() if name != "critic"}
    critic_stays = stays([Offload.all]) if ranks.world > 1 else 1
    in_bytes = {
        "sampling": {
            "parameters": 4 * parameters / share * (stays([Offload.all]) if sharded else 1),
            "whole weights": size * parameters if sharded or choose_engine(config.engine.kind, device) == EngineKind.sglang else 0,
            "Adam moments": 8 * trainable / share * stays([Offload.optimizer, Offload.all]),
            "critic": (4 * critic_stays + 8 * stays([Offload.optimizer, Offload.all])) * critic / share * (device.type == "cpu"),
            "KV cache": 2 * text.num_hidden_layers * kv_heads * head_dim * kv_tokens * size,
        },
        "training": {
            "parameters": 4 * parameters / share,
            "units whole": size * (embeddings + 2 * layer) if sharded else 0,
            **{name: 4 * count / share for name, count in scorers.items()},
            "critic": 12 * critic / share,
            "gradients": 4 * max(trainable, critic) / share,  # one after the other
            "Adam moments": 8 * trainable / share,
            "activations": activations,
            "logits": 3 * 4 * min(LOGIT_CHUNK_ELEMENTS, row * text.vocab_size),
        },
    }
    return {phase: {name: value / 2**30 for name, value in items.items()} for phase, items in in_bytes.items()}
