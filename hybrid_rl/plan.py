"""The dry run: load everything that is cheap, check it, and say what a run would do and how much memory it would take."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from hybrid_rl.config import Config
from hybrid_rl.console import Console
from hybrid_rl.data import load_task_sets
from hybrid_rl.data.render import demonstration, prompt_ids
from hybrid_rl.doctor import machine
from hybrid_rl.policy import tiny
from hybrid_rl.policy.layout import first_fit_decreasing
from hybrid_rl.policy.model import LOGIT_CHUNK_ELEMENTS, ModelError, pick_device
from hybrid_rl.ranks import Ranks
from hybrid_rl.rollout.reward import Scorer
from hybrid_rl.session import choose_layout


def print_plan(config: Config, console: Console, ranks: Ranks) -> None:
    """Raises the same errors a run would for a bad model folder, data set or reward."""
    device, r = pick_device(config.device), config.rollout
    with tempfile.TemporaryDirectory() as temporary:
        if not config.model.path:
            tiny.create(Path(temporary), config.model.tiny, config.seed)
        try:
            tokenizer = AutoTokenizer.from_pretrained(config.model.path or temporary, local_files_only=True)
            model_config = AutoConfig.from_pretrained(config.model.path or temporary, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelError(f"model.path={config.model.path} cannot be read: {str(error).strip().splitlines()[0]}") from error
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(model_config).parameters())
    wanted = r.batch_size // r.group_size
    tasks = load_task_sets(config.data, rl_tasks=wanted, sft_tasks=config.sft.batch_size if config.sft.steps else 0)
    prompts = [len(prompt_ids(task, tokenizer, r.max_prompt_tokens)) for task in [*tasks.rl, *tasks.eval]]
    scorer = Scorer(config.reward, 1, r.reward_timeout)
    try:
        scorer.check()
    finally:
        scorer.close()

    here = machine()
    console.heading(f"Plan for recipe {config.name} (nothing is trained)")
    console.say(f"machine    {here['cpu']}, {here['cores']} cores, {here['memory_gib']:.0f} GiB; {here['gpu'] or 'no GPU'}")
    console.say(f"ranks      {ranks.world} ({device.type})")
    console.say(f"engine     local: samples from the policy's own memory, {config.engine.slots} completions at a time")
    console.say(
        f"model      {config.model.path or 'embedded tiny Qwen3'}: {parameters:,} parameters, vocabulary {model_config.vocab_size:,}"
    )
    console.say(
        f"tasks      {len(tasks.sft):,} SFT, {len(tasks.rl):,} RL, {len(tasks.eval):,} held out; prompts of {min(prompts)} to {max(prompts)} tokens"
    )
    prompt = statistics.fmean(prompts)
    if config.sft.steps:
        answers = [demonstration(task, tokenizer, r.max_prompt_tokens).sampled for task in tasks.sft[:1000]]
        console.say(
            f"SFT        {config.sft.steps} steps × {config.sft.batch_size} demonstrations of {statistics.fmean(answers):.0f} tokens, lr {config.sft.optimizer.lr:g}"
        )
        console.say(_batch_line("typical", config, prompt, statistics.fmean(answers)))
    console.say(_batch_line("at most", config, prompt, r.max_tokens))
    updates = f"{config.algo.minibatches} AdamW step{'s' * (config.algo.minibatches > 1)} each"
    console.say(f"RL         {config.rl.steps} steps, {updates}, lr {config.rl.optimizer.lr:g}, temperature {r.temperature:g}")
    for line in _memory_lines(config, model_config, parameters, device):
        console.say(line)


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


def _memory_lines(config: Config, model: PreTrainedConfig, parameters: int, device: torch.device) -> list[str]:
    """Bytes by arithmetic, not measurement; activations are a rule of thumb (34 values a token and hidden unit a layer)."""
    text = model.get_text_config()
    size = 2 if device.type == "cuda" else 4
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    tokens = config.engine.slots * (config.rollout.max_prompt_tokens + config.rollout.max_tokens)
    kv = 2 * text.num_hidden_layers * kv_heads * head_dim * tokens * size
    states = parameters * 4 * 4  # parameters, gradients and two Adam moments, float32
    row = config.policy.row_tokens
    activations = 34 * text.num_hidden_layers * text.hidden_size * row * size + 3 * 4 * min(LOGIT_CHUNK_ELEMENTS, row * text.vocab_size)
    layout = choose_layout(config.policy.layout, device)
    return [
        f"memory     while sampling {(parameters * 4 + parameters * 8 + kv) / 2**30:.2f} GiB: parameters, Adam moments, KV cache {kv / 2**20:.0f} MiB",
        f"           while training {(states + activations) / 2**30:.2f} GiB: parameters, gradients, moments, one row's activations (layout {layout})",
    ]
