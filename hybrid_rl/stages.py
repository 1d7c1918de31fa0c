"""One run from its first line to its last: build what the stages share, run them in order, leave a complete folder."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from hybrid_rl.algo.declared import PartError
from hybrid_rl.config import Config, ConsoleKind, ExportDtype, only_evaluates
from hybrid_rl.data import DataError
from hybrid_rl.engine.base import EngineError
from hybrid_rl.evaluate import compare_models, evaluate, models_of
from hybrid_rl.handover import HandoverError
from hybrid_rl.machine import versions
from hybrid_rl.model_folder.read import ModelError
from hybrid_rl.plan import print_plan
from hybrid_rl.policy.optimizer import TrainingDiverged
from hybrid_rl.preflight.budget import BudgetError
from hybrid_rl.processes.deterministic import make_deterministic
from hybrid_rl.processes.launch import after_rank_0
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.processes.signals import Stopped
from hybrid_rl.report import write_report
from hybrid_rl.report.console import Console
from hybrid_rl.report.live import LiveConsole
from hybrid_rl.report.summary import conclude, introduce
from hybrid_rl.rl import NothingTrained, train_rl
from hybrid_rl.rollout.rewards import RewardError, Scorer
from hybrid_rl.run_folder.checkpoint import CheckpointError
from hybrid_rl.run_folder.files import FolderInUse, alone_in, remove_unfinished
from hybrid_rl.run_folder.final import export_final
from hybrid_rl.run_folder.origin import read_origin, write_origin
from hybrid_rl.run_folder.resume import resume_point
from hybrid_rl.run_folder.trackers import open_tracker
from hybrid_rl.session import Session, Start, build
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


def run(config: Config, folder: Path, ranks: Ranks | None = None, command: str = "") -> int:
    """Train as configured, in `folder`, and return the process's exit code. Every rank calls this.

    `command` is what started the run, for whoever reads its folder.
    """
    ranks = ranks or Ranks()
    console = make_console(config, ranks)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        models = models_of(config, folder)
        with nullcontext() if config.dry_run else console:
            for one, place in models:
                if not one.dry_run:
                    _run_stages(one, place, console, ranks, command)
                elif ranks.main:
                    print_plan(one, Path(config.output_dir) / config.name, console, ranks)
        if len(models) > 1 and not config.dry_run:
            ranks.from_main(lambda: compare_models(config, folder, console))
    except EXPECTED as error:
        after_rank_0()  # an error of all ranks is printed once
        Console().say(f"hybrid_rl: {error}")
        return 1
    except OSError as error:
        if error.errno not in DISK and not _inside(error.filename, folder):
            raise
        what = f"{folder} cannot be written to" if error.errno in DISK else f"{error.filename} cannot be used"
        after = f"its last checkpoint is whole; resume={folder} goes on from there"
        Console().say(f"hybrid_rl: {what}: {error.strerror}; {after}")
        return 1
    except Stopped as stopped:
        console.say(f"hybrid_rl: {signal.Signals(stopped.number).name}: {stopped}")
        return 128 + stopped.number
    return 0


def make_console(config: Config, ranks: Ranks) -> Console:
    """Return the console of this rank: rank 0 speaks.

    The view of console=live needs a terminal and a run of one rank: it would write over what other ranks print.
    """
    if config.console == ConsoleKind.live and ranks.world == 1 and sys.stdout.isatty():
        return LiveConsole()
    return Console(quiet=not ranks.main)


def _inside(name: object, folder: Path) -> bool:
    """Return whether `name`, the file of an OSError, lies in the run's folder."""
    return isinstance(name, str | os.PathLike) and Path(name).absolute().is_relative_to(folder.absolute())


def _run_stages(config: Config, folder: Path, console: Console, ranks: Ranks, command: str) -> None:
    """Build the session, run its stages, export and report. Raise NothingTrained if no RL step had a gradient."""
    started = time.perf_counter()
    if config.deterministic:
        make_deterministic(config.seed)
    with ExitStack() as stack:
        ranks.from_main(lambda: stack.enter_context(alone_in(folder)))
        resumed, notes = ranks.from_main(lambda: resume_point(config, folder))
        ranks.from_main(lambda: remove_unfinished(folder))
        r = config.rollout
        limits = r.reward_workers, r.reward_timeout, r.reward_start_timeout, r.reward_batch
        scorer = Scorer(config.reward, *limits, environment=config.environment)
        stack.callback(scorer.close)
        session = build(Start(config, folder, console, ranks, scorer, resumed, notes))
        stack.callback(_save_rest, session)
        session.progress.clock.start("total", started)
        introduce(session, notes)
        ranks.from_main(lambda: _track(session, command))
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


def _track(s: Session, command: str) -> None:
    """Write how the run was started, and begin its tracker. Rank 0 alone."""
    if s.resumed is None:
        write_origin(s.folder, command)
    facts = {**read_origin(s.folder), "versions": versions(), "folder": str(s.folder.absolute())}
    s.metrics.tracker = open_tracker(s.config, s.folder, facts, s.resumed is not None, s.console.say)


def _save_rest(s: Session) -> None:
    """Close the metrics, finish the rollouts' files, and publish a checkpoint that is written but not yet published, however the run ended.

    An error in the step after a save then loses nothing. Only on one rank: several can no longer agree on it.
    """
    with suppress(OSError):
        s.metrics.close()
    with suppress(OSError):
        s.rollouts.flush()
    with suppress(CheckpointError):
        if s.policy.ranks.world == 1:
            s.saver.publish()


def _stages(s: Session) -> None:
    """Evaluate, warm up, evaluate, train with RL, evaluate. A resumed run starts in its checkpoint's stage."""
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
        s.saver.publish()  # so that RL can be resumed from its first line on
    if number := s.stop_asked():
        s.stop(number, "all before RL is done and saved")
    if s.config.rl.steps:
        groups, size = s.config.rollout.batch_size // s.config.rollout.group_size, s.config.rollout.group_size
        s.console.heading(f"RL: {s.config.rl.steps} steps of {groups} tasks × {size} rollouts")
        with s.progress.clock.timed("rl"):
            train_rl(s)
        _evaluate(s, "rl", s.config.rl.steps)
    if number := s.stop_asked():
        s.stop(number, "all steps are done and saved, the last evaluation and the export are left")


def _evaluate(s: Session, name: str, step: int = 0) -> None:
    s.handover.to_engine(s.progress.version, verify=s.config.handover.verify)
    evaluate(s, name, step)
    s.handover.to_trainer()


def _finish(s: Session) -> None:
    """Export the model, and write report and summary; the summary comes last, because it marks a finished run."""
    if not only_evaluates(s.config):
        with s.progress.clock.timed("export"):
            export_final(s.policy, s.folder, float32=s.config.export.dtype == ExportDtype.float32)
    if s.policy.ranks.main and s.progress.best:  # the last evaluation may have found a better checkpoint
        s.saver.prune()
    s.rollouts.flush()
    s.metrics.close(finished=True)
    s.handover.engine.close()
    if s.policy.ranks.main:
        conclude(s)
