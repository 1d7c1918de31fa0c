"""Print the plan of a run (dry_run=true): load and check what is cheap, and compute its work, memory and disk space."""

from __future__ import annotations

import statistics
import tempfile
from datetime import datetime
from pathlib import Path

import torch

from hybrid_rl.algo.contract import check_parts
from hybrid_rl.algo.declared import removed_signal
from hybrid_rl.config import Config, data_config
from hybrid_rl.data.prepare import environment_of, load, prepare
from hybrid_rl.data.render import demonstration
from hybrid_rl.data.template import fix_template
from hybrid_rl.engine.make import ENGINES, choose_engine
from hybrid_rl.machine import machine
from hybrid_rl.model_folder.tokenizer import read_tokenizer
from hybrid_rl.policy import tiny
from hybrid_rl.policy.defaults import described, settled
from hybrid_rl.policy.layout import best_fit_decreasing
from hybrid_rl.policy.model import pick_device
from hybrid_rl.policy.reward_model import check_reward_model
from hybrid_rl.preflight.budget import (
    Sizes,
    check_budget,
    check_lengths,
    disk_bytes,
    measure,
    memory_by_phase,
    rollout_bytes,
)
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.report.console import Console
from hybrid_rl.rollout.collector import extra_groups
from hybrid_rl.rollout.rewards import Scorer
from hybrid_rl.run_folder.clock import FILE, read_clock
from hybrid_rl.run_folder.resume import changed_settings


def print_plan(config: Config, folder: Path, console: Console, ranks: Ranks) -> None:
    """Print what a run in `folder` would do.

    Raises the errors that the run would raise for a bad model folder, data set or reward, or too little memory or disk
    space.
    """
    device, r = pick_device(config.device), config.rollout
    check_parts(config)
    if (Path(config.resume) / "config.yaml").exists():
        changed_settings(config, Path(config.resume))
    tasks = load(config)
    with tempfile.TemporaryDirectory() as temporary:
        if not config.model.path:
            tiny.create(Path(temporary), config.model.tiny, config.seed)
        tokenizer = read_tokenizer(config.model.path or temporary)
        sizes = measure(config, config.model.path or temporary)
    if config.reward_model.path:
        check_reward_model(config.reward_model.path)
    config = settled(config, sizes.model, device)
    now = read_clock(Path(config.resume)) if (Path(config.resume) / FILE).exists() else datetime.now()
    fix_template(tokenizer, data_config(config.data), now, environment_of(config).tools)
    checked = prepare(config, tasks, tokenizer, sizes.model.get_text_config().vocab_size)
    tasks = tasks.without(checked.dropped)
    lengths = check_lengths(config, sizes, checked.longest)
    prompts = [*checked.lengths["rl"], *checked.lengths["eval"]]
    scorer = Scorer(config.reward, 1, r.reward_timeout, r.reward_start_timeout, environment=config.environment)
    try:
        notes = scorer.check([*tasks.rl, *tasks.eval])
    finally:
        scorer.close()

    here = machine()
    console.heading(f"Plan for recipe {config.name} (nothing is trained)")
    console.say(
        f"machine    {here['cpu']}, {here['cores']} cores, {here['memory_gib']:.0f} GiB; {here['gpu'] or 'no GPU'}"
    )
    console.say(f"ranks      {ranks.world} ({device.type}), {described(config.policy, device)}")
    engine = choose_engine(config.engine.kind, device)
    console.say(f"engine     {engine.value}: {ENGINES[engine]}, {config.engine.slots} completions at a time")
    model, vocabulary = config.model.path or "embedded tiny Qwen3", sizes.model.vocab_size
    console.say(f"model      {model}: {sizes.parameters:,} parameters, vocabulary {vocabulary:,}")
    console.say(
        f"tasks      {len(tasks.sft):,} SFT, {len(tasks.rl):,} RL, {len(tasks.eval):,} held out; "
        f"prompts of {min(prompts)} to {max(prompts)} tokens"
    )
    removed = removed_signal(config.algo.advantage, config.algo.silent_by)
    for note in [*notes, *tasks.notes, *checked.notes, *lengths, *filter(None, [removed])]:
        console.say(f"note       {note}")
    prompt = statistics.fmean(prompts)
    if config.sft.steps:
        answers = [demonstration(task, tokenizer, r.max_prompt_tokens).sampled for task in tasks.sft[:1000]]
        console.say(
            f"SFT        {config.sft.steps} steps × {config.sft.batch_size} demonstrations of "
            f"{statistics.fmean(answers):.0f} tokens, lr {config.sft.optimizer.lr:g}"
        )
        console.say(_batch_line("typical", config, prompt, min(statistics.fmean(answers), r.max_tokens)))
    console.say(_batch_line("at most", config, max(prompts), r.max_tokens))
    steps = config.algo.minibatches * config.algo.epochs
    extra = extra_groups(r.oversample, r.batch_size // r.group_size)
    beside = f", {extra} more tasks under way (rollout.oversample)" if extra else ""
    updates = f"{steps} AdamW step{'s' * (steps > 1)} each"
    console.say(
        f"RL         {config.rl.steps} steps, {updates}, lr {config.rl.optimizer.lr:g}, temperature {r.temperature:g}{beside}"
    )
    if sizes.beside:
        console.say(
            "beside it  " + ", ".join(f"{name} of {count:,} parameters" for name, count in sizes.beside.items())
        )
    for line in _memory_lines(config, sizes, device, ranks):
        console.say(line)
    rollouts, keep = rollout_bytes(config, len(tasks.eval)) / 2**30, r.keep_steps or "all"
    console.say(
        f"disk       {disk_bytes(config, sizes) / 2**30:.2f} GiB for checkpoints and exported models, "
        f"about {rollouts:.2f} GiB for rollouts of rollout.max_tokens={r.max_tokens} "
        f"(rollout.keep_steps={r.keep_steps}: {keep} steps)"
    )
    check_budget(config, sizes, device, ranks, folder)


def _batch_line(label: str, config: Config, prompt: float, completion: float) -> str:
    """Return a line on how many rows the rollouts of a step fill, if all completions have `completion` tokens."""
    r, row = config.rollout, config.policy.row_tokens
    sample = round(prompt + completion)
    rows = len(best_fit_decreasing([sample] * r.batch_size, row))
    groups = r.batch_size // r.group_size
    tree = round(groups * prompt + r.batch_size * completion)
    return (
        f"{label:<11}{groups} tasks × {r.group_size} = {r.batch_size} rollouts of {sample} tokens = "
        f"{r.batch_size * sample:,} tokens → {rows} rows of {row:,} ({row // sample} samples a row); "
        f"as group trees {tree:,} tokens"
    )


def _memory_lines(config: Config, sizes: Sizes, device: torch.device, ranks: Ranks) -> list[str]:
    lines: list[str] = []
    for phase, items in memory_by_phase(config, sizes, device, ranks).items():
        what = " + ".join(f"{name} {gib:.2f}" for name, gib in items.items() if gib >= 0.005)
        lines.append(f"{'memory' if not lines else '':<11}{phase}: {sum(items.values()):.2f} GiB a rank ({what})")
    return lines
