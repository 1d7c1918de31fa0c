"""One run from its first line to its last: build what the stages share, run them in order, leave a complete folder."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from hybrid_rl.algo.declared import PartError, removed_signal
from hybrid_rl.build import Start, build
from hybrid_rl.config import Config, EngineKind, ExportDtype, only_evaluates
from hybrid_rl.data import DataError
from hybrid_rl.deterministic import make_deterministic
from hybrid_rl.engine.base import EngineError
from hybrid_rl.engine.make import ENGINES, choose_engine
from hybrid_rl.engine.sglang.interface import withheld
from hybrid_rl.evaluate import evaluate
from hybrid_rl.handover import HandoverError
from hybrid_rl.machine import machine, versions
from hybrid_rl.model_folder.read import ModelError
from hybrid_rl.plan import print_plan
from hybrid_rl.policy.defaults import described
from hybrid_rl.policy.optimizer import TrainingDiverged
from hybrid_rl.preflight.budget import BudgetError
from hybrid_rl.processes.launch import after_rank_0
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.processes.signals import Stopped
from hybrid_rl.report import write_report
from hybrid_rl.report.console import Console
from hybrid_rl.rl import NothingTrained, train_rl
from hybrid_rl.rollout.rewards import RewardError, Scorer
from hybrid_rl.run_folder.checkpoint import CheckpointError
from hybrid_rl.run_folder.files import (
    FolderInUse,
    alone_in,
    json_text,
    remove,
    remove_unfinished,
    sync_tree,
    write_json,
)
from hybrid_rl.run_folder.resume import resume_point
from hybrid_rl.session import Session
from hybrid_rl.sft import train_sft

# What ends a run with one line instead of a traceback: the line says what to do.
EXPECTED = (
    ModelError,
    DataError,
    RewardError,
    EngineError,
    HandoverError,
    CheckpointError,
    TrainingDiverged,
    FolderInUse,
    SafetensorError,
    BudgetError,
    NothingTrained,
    PartError,
)
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


def run(config: Config, folder: Path, ranks: Ranks | None = None) -> int:
    """Train as configured, in `folder`; returns the process's exit code. Every rank calls this."""
    ranks = ranks or Ranks()
    console = Console(quiet=not ranks.main)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        if not config.dry_run:
            _train(config, folder, console, ranks)
        elif ranks.main:
            print_plan(config, Path(config.output_dir) / config.name, console, ranks)
    except EXPECTED as error:
        after_rank_0()  # an error of all ranks is said once
        Console().say(f"hybrid_rl: {error}")
        return 1
    except OSError as error:
        if error.errno not in DISK and not _inside(error.filename, folder):
            raise
        what = f"{folder} cannot be written to" if error.errno in DISK else f"{error.filename} cannot be used"
        Console().say(
            f"hybrid_rl: {what}: {error.strerror}; its last checkpoint is whole; resume={folder} goes on from there"
        )
        return 1
    except Stopped as stopped:
        console.say(f"hybrid_rl: {signal.Signals(stopped.number).name}: {stopped}")
        return 128 + stopped.number
    return 0


def _inside(name: object, folder: Path) -> bool:
    """Whether the file of an OSError is one of the run's."""
    return isinstance(name, str | os.PathLike) and Path(name).absolute().is_relative_to(folder.absolute())


def _train(config: Config, folder: Path, console: Console, ranks: Ranks) -> None:
    started = time.perf_counter()
    if config.deterministic:
        make_deterministic(config.seed)
    with ExitStack() as stack:
        ranks.from_main(lambda: stack.enter_context(alone_in(folder)))
        resumed, notes = ranks.from_main(lambda: resume_point(config, folder))
        ranks.from_main(lambda: remove_unfinished(folder))
        r = config.rollout
        scorer = Scorer(config.reward, r.reward_workers, r.reward_timeout, r.reward_start_timeout)
        stack.callback(scorer.close)
        session = build(Start(config, folder, console, ranks, scorer, resumed, notes))
        stack.callback(_let_go, session)
        session.progress.clock.start("total", started)
        _introduce(session, notes)
        try:
            _stages(session)
        except NothingTrained:
            ranks.from_main(lambda: write_report(folder))
            raise
        _finish(session)
        if config.rl.steps and config.rl.max_empty_steps and not session.progress.trained_steps:
            raise NothingTrained(
                f"the run trained nothing: none of its RL steps had a gradient; see why in {folder / 'report.html'}"
            )


def _let_go(s: Session) -> None:
    """However the run ended. What one rank has saved is not lost to an error in the step after; several cannot agree on it any more."""
    with suppress(OSError):
        s.metrics.close()
    with suppress(CheckpointError):
        if s.policy.ranks.world == 1:
            s.saver.publish()


def _stages(s: Session) -> None:
    """Evaluate, warm up, evaluate, train with RL, evaluate; a resumed run starts in the stage its checkpoint is of."""
    if only_evaluates(s.config):
        s.console.heading("Evaluation")
        _evaluate(s, "model")
        return
    stage = s.resumed.state["stage"] if s.resumed else "base"
    if number := s.stop_asked():
        if s.resumed:
            s.stop(number, f"it stands at {s.resumed.folder.name} as before")
        raise Stopped(number, "nothing was trained yet, and there is nothing to go on from")
    if stage == "base":
        s.console.heading("Base model")
        _evaluate(s, "base")
        if number := s.stop_asked():
            s.saver.save("sft" if s.config.sft.steps else "rl", 0)
            s.stop(number, "the base model is evaluated and saved")
    if stage in ("base", "sft") and s.config.sft.steps:
        s.console.heading(f"SFT: {s.config.sft.steps} steps of {s.config.sft.batch_size} demonstrations")
        train_sft(s)
        _evaluate(s, "sft")
    if stage != "rl":
        s.saver.save("rl", 0)
        s.saver.publish()  # from the first line of RL on there is one to go on from
    if number := s.stop_asked():
        s.stop(number, "all before RL is done and saved")
    rollout = s.config.rollout
    if s.config.rl.steps:
        s.console.heading(
            f"RL: {s.config.rl.steps} steps of {rollout.batch_size // rollout.group_size} tasks × {rollout.group_size} rollouts"
        )
        with s.progress.clock.timed("rl"):
            train_rl(s)
        _evaluate(s, "rl", s.config.rl.steps)
    if number := s.stop_asked():
        s.stop(number, "all steps are done and saved, the last evaluation and the export are left")


def _evaluate(s: Session, name: str, step: int = 0) -> None:
    s.turn.to_engine(s.progress.version, verify=s.config.handover.verify)
    evaluate(s, name, step)
    s.turn.to_trainer()


def _introduce(s: Session, notes: list[str]) -> None:
    """Say what the run is, the machine, what was chosen for it, and what is new since the run was saved."""
    here, config, say, world = machine(), s.config, s.console.say, s.policy.ranks.world
    kind = choose_engine(config.engine.kind, s.policy.device)
    say(f"hybrid_rl · recipe {config.name} · seed {config.seed} · {s.folder}")
    say(f"machine: {here['cpu']}, {here['cores']} cores, {here['memory_gib']:.0f} GiB; {here['gpu'] or 'no GPU'}")
    say(
        f"chosen:  {world} rank{'s' * (world > 1)} on {s.policy.device.type}, {torch.get_num_threads()} thread(s) each, "
        f"engine {kind.value} ({ENGINES[kind]}), {described(s.policy.settings, s.policy.device)}"
    )
    trained = sum(p.numel() for p in s.policy.trainable.values())
    adapters = (
        f", of which {trained:,} are trained (LoRA adapters of rank {config.policy.lora.rank})"
        if config.policy.lora.rank
        else ""
    )
    say(f"model:   {config.model.path or 'embedded tiny Qwen3'}, {s.policy.parameter_count():,} parameters{adapters}")
    say(f"tasks:   {len(s.tasks.sft):,} for SFT, {len(s.tasks.rl):,} for RL, {len(s.tasks.eval):,} held out")
    if removed := removed_signal(config.algo.advantage, config.algo.silent_by):
        say(f"note:    {removed}")
    if kind == EngineKind.sglang and (names := withheld()):
        say(
            f"note:    SGLang's process is started without {', '.join(names)}: they could change its samples, or the memory it gives back"
        )
    if config.rollout.top_k or config.rollout.top_p < 1:
        say(
            "note:    top-k or top-p restrict sampling; the update still compares whole distributions, so ratios are biased"
        )
    if s.resumed:
        say(f"resumed: {s.resumed.folder.name}, version {s.progress.version}")
    for note in notes:
        say(f"note:    {note}")


def _finish(s: Session) -> None:
    """Export the model, write summary and report, say where they lie. The summary comes last: it marks a finished run."""
    if not only_evaluates(s.config):
        with s.progress.clock.timed("export"):
            _export(s)
    if s.policy.ranks.main and s.progress.best:  # the last evaluation may have found a better one than was kept
        s.saver.prune()
    s.metrics.close()
    s.turn.engine.close()
    if not s.policy.ranks.main:
        return
    summary = _summary(s)
    report = write_report(s.folder, json.loads(json_text(summary)))
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
    best, stats = s.progress.best, s.turn.engine.stats
    return {
        "name": s.config.name,
        "seed": s.config.seed,
        **{f"eval/{name}": s.progress.evaluations.get(name) for name in names},
        "best": {**best, "checkpoint": f"checkpoints/{s.saver.best}"} if best else None,
        "seconds": s.progress.clock.spent(),
        "versions": versions(),
        "machine": machine(),
        "ranks": s.policy.ranks.world,
        "model": {
            "path": s.config.model.path or "embedded tiny Qwen3",
            "parameters": s.policy.parameter_count(),
            "trained": sum(p.numel() for p in s.policy.trainable.values()),
        },
        "engine": {**asdict(stats), "cache_hit_rate": stats.cache_hit_rate},
    }


def _export(s: Session) -> None:
    exported = s.folder / ".final"
    for left in (exported, exported.with_name(f"{exported.name}_adapter")):
        s.policy.ranks.from_main(partial(remove, left))
    s.policy.export(exported, float32=s.config.export.dtype == ExportDtype.float32)
    s.policy.ranks.from_main(lambda: _put(exported, s.folder / "final"))


def _put(exported: Path, final: Path) -> None:
    """Rename the finished export, and the folder of its adapters, to where they are expected."""
    for suffix in ("", "_adapter"):
        made, wanted = (folder.with_name(folder.name + suffix) for folder in (exported, final))
        if made.exists():
            sync_tree(made)
            remove(wanted)
            os.replace(made, wanted)
