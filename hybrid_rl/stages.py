"""One run from its first line to its last: build what the stages share, run them in order, leave a complete folder."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from hybrid_rl.algo.contract import check_parts
from hybrid_rl.algo.declared import PartError, removed_signal
from hybrid_rl.config import Config, EngineKind, ExportDtype, only_evaluates
from hybrid_rl.data import DataError, TaskSets, load_task_sets, template_arguments
from hybrid_rl.data.render import Checked, check_prompts
from hybrid_rl.data.template import fix_template
from hybrid_rl.deterministic import make_deterministic
from hybrid_rl.engine.base import KV_CACHE, WEIGHTS, EngineError
from hybrid_rl.engine.make import ENGINES, make_engine
from hybrid_rl.engine.sglang.interface import withheld
from hybrid_rl.evaluate import evaluate
from hybrid_rl.handover import HandoverError, take_back
from hybrid_rl.machine import cores, machine, versions
from hybrid_rl.model_folder.read import ModelError, read_config
from hybrid_rl.model_folder.tokenizer import read_tokenizer
from hybrid_rl.plan import print_plan
from hybrid_rl.policy import tiny
from hybrid_rl.policy.model import Policy, pick_device
from hybrid_rl.policy.optimizer import TrainingDiverged
from hybrid_rl.preflight.budget import BudgetError, check_budget, check_lengths, measure
from hybrid_rl.processes.launch import after_rank_0
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.processes.signals import Stopped
from hybrid_rl.report import write_report
from hybrid_rl.report.console import Console
from hybrid_rl.rl import NothingTrained, train_rl
from hybrid_rl.rollout.rewards import RewardError, Scorer
from hybrid_rl.run_folder import checkpoint
from hybrid_rl.run_folder.checkpoint import CheckpointError
from hybrid_rl.run_folder.clock import read_clock, start_clock
from hybrid_rl.run_folder.files import (
    FolderInUse,
    alone_in,
    json_text,
    remove,
    remove_unfinished,
    sync_tree,
    write_json,
    write_text,
)
from hybrid_rl.run_folder.metrics import Metrics
from hybrid_rl.run_folder.resume import check_data, digests, resume_point
from hybrid_rl.session import Session
from hybrid_rl.sft import train_sft

# What ends a run with one line instead of a traceback: the line says what to do.
EXPECTED = (
    ModelError, DataError, RewardError, EngineError, HandoverError, CheckpointError, TrainingDiverged, FolderInUse, SafetensorError, BudgetError,
    NothingTrained, PartError,
)  # fmt: skip
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
TINY_PARAMETERS = 10_000_000  # below this, more threads than one cost more than they give


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
        session = _build(config, folder, console, scorer, resumed, ranks, notes)
        stack.callback(_let_go, session)
        session.running["total"] = started
        _introduce(session, notes)
        try:
            _stages(session)
        except NothingTrained:
            ranks.from_main(lambda: write_report(folder))
            raise
        _finish(session)
        if config.rl.steps and config.rl.max_empty_steps and not session.trained_steps:
            raise NothingTrained(
                f"the run trained nothing: none of its RL steps had a gradient; see why in {folder / 'report.html'}"
            )


def _let_go(s: Session) -> None:
    """However the run ended. What one rank has saved is not lost to an error in the step after; several cannot agree on it any more."""
    with suppress(OSError):
        s.metrics.close()
    with suppress(CheckpointError):
        if s.ranks.world == 1:
            s.publish_checkpoint()


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
            s.save_checkpoint("sft" if s.config.sft.steps else "rl", 0, None)
            s.stop(number, "the base model is evaluated and saved")
    if stage in ("base", "sft") and s.config.sft.steps:
        s.console.heading(f"SFT: {s.config.sft.steps} steps of {s.config.sft.batch_size} demonstrations")
        train_sft(s)
        _evaluate(s, "sft")
    if stage != "rl":
        s.save_checkpoint("rl", 0, None)
        s.publish_checkpoint()  # from the first line of RL on there is one to go on from
    if number := s.stop_asked():
        s.stop(number, "all before RL is done and saved")
    rollout = s.config.rollout
    if s.config.rl.steps:
        s.console.heading(
            f"RL: {s.config.rl.steps} steps of {rollout.batch_size // rollout.group_size} tasks × {rollout.group_size} rollouts"
        )
        with s.timed("rl"):
            train_rl(s)
        _evaluate(s, "rl", s.config.rl.steps)
    if number := s.stop_asked():
        s.stop(number, "all steps are done and saved, the last evaluation and the export are left")


def _evaluate(s: Session, name: str, step: int = 0) -> None:
    s.hand_over(verify=s.config.handover.verify)
    evaluate(s, name, step)
    take_back(s.policy, s.engine)


def _build(
    config: Config, folder: Path, console: Console, scorer: Scorer, resumed: checkpoint.Checkpoint | None, ranks: Ranks, notes: list[str]
) -> Session:  # fmt: skip
    """Load everything the stages need; if a checkpoint is resumed, as it stood then. `notes` get what a reader should know."""
    device, r = pick_device(config.device), config.rollout
    ranks.from_main(lambda: check_parts(config))
    tasks = load_task_sets(
        config.data,
        rl_tasks=r.batch_size // r.group_size if config.rl.steps else 0,
        sft_tasks=config.sft.batch_size if config.sft.steps else 0,
    )
    data = ranks.from_main(lambda: digests(config, tasks))
    if resumed:
        notes += check_data(resumed, data)
    model_folder = Path(config.model.path) if config.model.path else folder / "base_model"
    if not config.model.path and resumed is None:
        ranks.from_main(lambda: _make_tiny(model_folder, config))
    now = ranks.from_main(lambda: read_clock(folder) if resumed else start_clock(folder))
    checked = ranks.from_main(lambda: _check_prompts(tasks, model_folder, config, now))
    sizes = ranks.from_main(lambda: measure(config, model_folder))
    notes += checked.notes
    notes += ranks.from_main(lambda: check_lengths(config, sizes, checked.longest))
    ranks.from_main(lambda: check_budget(config, sizes, device, ranks, folder))
    notes += ranks.on_all(lambda: scorer.check([*tasks.rl, *tasks.eval]))
    torch.manual_seed(config.seed)  # adapters begin at random
    policy = Policy.load(model_folder, device, config.policy, ranks)
    fix_template(policy.tokenizer, template_arguments(config.data), now)
    threads = 1 if policy.parameter_count() < TINY_PARAMETERS else max(1, cores() // ranks.local_world)
    torch.set_num_threads(config.threads or threads)
    ranks.from_main(lambda: (folder / "rollouts").mkdir(parents=True, exist_ok=True))
    if resumed is None:
        ranks.from_main(lambda: write_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(config))))
    metrics = Metrics(
        folder / "metrics.jsonl" if ranks.main else None, keep_lines=resumed.state["metrics_lines"] if resumed else 0
    )
    engine = make_engine(config, policy, model_folder, folder)
    session = Session(config, folder, model_folder, policy, engine, tasks, scorer, metrics, console, resumed, data=data)
    if resumed:
        ranks.on_all(
            lambda: engine.sleep([KV_CACHE, WEIGHTS])
        )  # a new one is awake, and a resumed run may go on with training
        resumed.restore_policy(policy)
        session.version, session.evaluations = resumed.state["version"], resumed.state["evaluations"]
        session.trained_steps = resumed.state.get("trained_steps", 1)  # checkpoints of earlier versions do not count
        session.empty_steps = resumed.state.get("empty_steps", 0)
        session.seconds, session.best = resumed.state["seconds"], resumed.state["best"]
        ranks.from_main(
            lambda: (folder / "summary.json").unlink(missing_ok=True)
        )  # it marks a finished run, and this one goes on
    return session


def _check_prompts(tasks: TaskSets, model_folder: Path, config: Config, now: datetime) -> Checked:
    """Before the model loads: can each task be rendered, and does it fit?"""
    vocabulary, r = read_config(model_folder).get_text_config().vocab_size, config.rollout
    tokenizer = fix_template(read_tokenizer(model_folder), template_arguments(config.data), now)
    return check_prompts(
        tasks, tokenizer, vocabulary,
        max_tokens=r.max_prompt_tokens, row_tokens=config.policy.row_tokens, sft=bool(config.sft.steps),
    )  # fmt: skip


def _make_tiny(folder: Path, config: Config) -> None:
    remove(folder)  # what a run killed before its first checkpoint left
    tiny.create(folder, config.model.tiny, config.seed)


def _introduce(s: Session, notes: list[str]) -> None:
    """What the run is, the machine, and what was chosen for it; and what is new since the run was saved."""
    here, config, say = machine(), s.config, s.console.say
    say(f"hybrid_rl · recipe {config.name} · seed {config.seed} · {s.folder}")
    say(f"machine: {here['cpu']}, {here['cores']} cores, {here['memory_gib']:.0f} GiB; {here['gpu'] or 'no GPU'}")
    say(
        f"chosen:  {s.ranks.world} rank{'s' * (s.ranks.world > 1)} on {s.policy.device.type}, {torch.get_num_threads()} thread(s) each, "
        f"engine {s.engine_kind.value} ({ENGINES[s.engine_kind]}), layout {s.layout}, compute {str(s.policy.dtype).removeprefix('torch.')}"
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
    if s.engine_kind == EngineKind.sglang and (names := withheld()):
        say(
            f"note:    SGLang's process is started without {', '.join(names)}: they could change its samples, or the memory it gives back"
        )
    if config.rollout.top_k or config.rollout.top_p < 1:
        say(
            "note:    top-k or top-p restrict sampling; the update still compares whole distributions, so ratios are biased"
        )
    if s.resumed:
        say(f"resumed: {s.resumed.folder.name}, version {s.version}")
    for note in notes:
        say(f"note:    {note}")


def _finish(s: Session) -> None:
    """Export the model, write summary and report, say where they lie. The summary comes last: it marks a finished run."""
    if not only_evaluates(s.config):
        _export(s)
    if s.ranks.main and s.best:  # the last evaluation may have found a better one than that which was kept
        checkpoint.prune(s.folder / "checkpoints", s.config.rl.keep_checkpoints, s.best_checkpoint)
    s.metrics.close()
    s.engine.close()
    if not s.ranks.main:
        return
    summary = {
        "name": s.config.name, "seed": s.config.seed,
        **{f"eval/{name}": s.evaluations.get(name) for name in (("model",) if only_evaluates(s.config) else ("base", "sft", "rl"))},
        "best": {**s.best, "checkpoint": f"checkpoints/{s.best_checkpoint}"} if s.best else None,
        "seconds": s.spent(),
        "versions": versions(), "machine": machine(), "ranks": s.ranks.world,
        "model": {"path": s.config.model.path or "embedded tiny Qwen3", "parameters": s.policy.parameter_count(),
                  "trained": sum(p.numel() for p in s.policy.trainable.values())},
        "engine": {**asdict(s.engine.stats), "cache_hit_rate": s.engine.stats.cache_hit_rate},
    }  # fmt: skip
    report = write_report(s.folder, json.loads(json_text(summary)))
    write_json(s.folder / "summary.json", summary)
    s.console.heading("Done")
    course = " → ".join(f"{name} {value:.3f}" for name, value in s.evaluations.items() if name != "step")
    s.console.say(f"evaluation reward: {course}   ({s.spent()['total']:.0f} s in all)")
    if s.best:
        s.console.say(f"best:    {s.folder / 'checkpoints' / str(s.best_checkpoint)}, reward {s.best['reward']:.3f}")
    s.console.say(f"report:  {report}")
    s.console.say(f"samples: {s.folder / 'samples.md'}")
    if only_evaluates(s.config):
        return
    s.console.say(f"model:   {s.folder / 'final'}")
    if s.config.policy.lora.rank:
        s.console.say(f"adapter: {s.folder / 'final_adapter'}")


def _export(s: Session) -> None:
    with s.timed("export"):
        exported = s.folder / ".final"
        for left in (exported, exported.with_name(f"{exported.name}_adapter")):
            s.ranks.from_main(partial(remove, left))
        s.policy.export(exported, float32=s.config.export.dtype == ExportDtype.float32)
        s.ranks.from_main(lambda: _put(exported, s.folder / "final"))


def _put(exported: Path, final: Path) -> None:
    """Rename the finished export, and the folder of its adapters, to where they are expected."""
    for suffix in ("", "_adapter"):
        made, wanted = (folder.with_name(folder.name + suffix) for folder in (exported, final))
        if made.exists():
            sync_tree(made)
            remove(wanted)
            os.replace(made, wanted)
