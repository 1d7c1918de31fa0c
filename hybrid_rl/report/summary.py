"""Say what a run is when it begins, and what came of it at its end, on the console and in summary.json."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from hybrid_rl.algo.declared import removed_signal
from hybrid_rl.config import EngineKind, only_evaluates
from hybrid_rl.engine.make import ENGINES, choose_engine
from hybrid_rl.engine.sglang.interface import withheld
from hybrid_rl.machine import machine, versions
from hybrid_rl.policy.defaults import described
from hybrid_rl.policy.model import Policy
from hybrid_rl.report import write_card, write_report
from hybrid_rl.run_folder.files import json_text, write_json

if TYPE_CHECKING:  # a session holds the console of this package
    from hybrid_rl.session import Session

TINY = "embedded tiny Qwen3"  # the model of a run without model.path


def introduce(s: Session, notes: list[str]) -> None:
    """Print the run, the machine, what was chosen for it, and `notes` on what a reader should know."""
    here, config, say, world = machine(), s.config, s.console.say, s.policy.ranks.world
    kind = choose_engine(config.engine.kind, s.policy.device)
    say(f"hybrid_rl · recipe {config.name} · seed {config.seed} · {s.folder}")
    say(f"machine: {here['cpu']}, {here['cores']} cores, {here['memory_gib']:.0f} GiB; {here['gpu'] or 'no GPU'}")
    say(
        f"chosen:  {world} rank{'s' * (world > 1)} on {s.policy.device.type}, "
        f"{torch.get_num_threads()} thread(s) each, engine {kind.value} ({ENGINES[kind]}), "
        f"{described(s.policy.settings, s.policy.device)}"
    )
    adapters = (
        f", of which {_trained(s.policy):,} are trained (LoRA adapters of rank {config.policy.lora.rank})"
        if config.policy.lora.rank
        else ""
    )
    say(f"model:   {config.model.path or TINY}, {s.policy.parameter_count():,} parameters{adapters}")
    say(f"tasks:   {len(s.tasks.sft):,} for SFT, {len(s.tasks.rl):,} for RL, {len(s.tasks.eval):,} held out")
    if removed := removed_signal(config.algo.advantage, config.algo.silent_by):
        say(f"note:    {removed}")
    if kind == EngineKind.sglang and (names := withheld()):
        say(
            f"note:    SGLang's process is started without {', '.join(names)}: they could change its samples, "
            "or the memory it gives back"
        )
    if config.rollout.top_k or config.rollout.top_p < 1:
        say(
            "note:    top-k or top-p restrict sampling; the update still compares whole distributions, "
            "so ratios are biased"
        )
    if s.resumed:
        say(f"resumed: {s.resumed.folder.name}, version {s.progress.version}")
    for note in notes:
        say(f"note:    {note}")


def conclude(s: Session) -> None:
    """Write the report, then summary.json, which marks a finished run, and print where everything lies. Rank 0 only."""
    summary = _summary(s)
    written = json.loads(json_text(summary))
    report = write_report(s.folder, written)
    if not only_evaluates(s.config):
        write_card(s.folder, written)
    write_json(s.folder / "summary.json", summary)
    say, progress = s.console.say, s.progress
    s.console.heading("Done")
    course = " → ".join(f"{name} {value:.3f}" for name, value in progress.evaluations.items() if name != "step")
    say(f"evaluation reward: {course}   ({progress.clock.spent()['total']:.0f} s in all)")
    if progress.best:
        say(f"best:    {s.saver.folder / str(s.saver.best)}, reward {progress.best['reward']:.3f}")
    say(f"report:  {report}")
    say(f"samples: {s.folder / 'samples.md'}")
    if only_evaluates(s.config):
        return
    say(f"model:   {s.folder / 'final'}")
    if s.config.policy.lora.rank:
        say(f"adapter: {s.folder / 'final_adapter'}")


def _summary(s: Session) -> dict[str, object]:
    names = ("model",) if only_evaluates(s.config) else ("base", "sft", "rl")
    best, stats = s.progress.best, s.handover.engine.stats
    return {
        "name": s.config.name,
        "seed": s.config.seed,
        **{f"eval/{name}": s.progress.evaluations.get(name) for name in names},
        "best": {**best, "checkpoint": f"checkpoints/{s.saver.best}"} if best else None,
        "tasks": {"sft": len(s.tasks.sft), "rl": len(s.tasks.rl), "eval": len(s.tasks.eval), "notes": s.tasks.notes},
        "seconds": s.progress.clock.spent(),
        "versions": versions(),
        "machine": machine(),
        "ranks": s.policy.ranks.world,
        "model": {
            "path": s.config.model.path or TINY,
            "parameters": s.policy.parameter_count(),
            "trained": _trained(s.policy),
        },
        "engine": {**asdict(stats), "cache_hit_rate": stats.cache_hit_rate},
    }


def _trained(policy: Policy) -> int:
    """Return the number of parameters that training changes."""
    return sum(p.numel() for p in policy.trainable.values())
