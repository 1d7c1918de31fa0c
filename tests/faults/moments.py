"""Where a run can be met: every phase by name, its calls counted, and a signal, or worse, inside one of them."""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# where the name is looked up when the phase begins
PHASES = {
    "load": ["hybrid_rl.stages.build"],
    "handover": ["hybrid_rl.handover.hand_over", "hybrid_rl.handover.take_back"],
    "evaluation": ["hybrid_rl.rl.evaluate", "hybrid_rl.stages.evaluate"],
    "sampling": ["hybrid_rl.rollout.collector.Collector._fill"],
    "scoring": ["hybrid_rl.rollout.rewards.Scorer.finish"],
    "imitation": ["hybrid_rl.sft.imitate"],
    "update": ["hybrid_rl.learner.Learner.learn"],
    "rollouts": ["hybrid_rl.run_folder.rollouts.write_rollouts"],
    "metrics": ["hybrid_rl.run_folder.metrics.Metrics.write"],
    "copy": ["hybrid_rl.run_folder.checkpoint.begin"],
    "write": ["hybrid_rl.run_folder.checkpoint._write"],
    "publish": ["hybrid_rl.run_folder.checkpoint.Saving.publish"],
    "prune": ["hybrid_rl.run_folder.checkpoint.prune", "hybrid_rl.run_folder.checkpoint._discard"],
    "export": ["hybrid_rl.policy.model.Policy.export", "hybrid_rl.run_folder.final._put"],
    "report": ["hybrid_rl.report.summary.write_report", "hybrid_rl.report.summary.write_json"],
    "disk": ["os.fsync", "os.replace", "shutil.rmtree", "os.unlink"],
}


@dataclass(frozen=True)
class Moment:
    """`after` seconds into call number `call` (from 0) of the phase, 0: before its first line, something happens.

    SIGKILL goes to the whole process group, any other signal to the process alone.
    """

    phase: str
    call: int
    after: float = 0.0
    happens: int | Callable[[], None] = signal.SIGKILL

    def strike(self) -> None:
        if callable(self.happens):
            self.happens()
        elif self.happens == signal.SIGKILL:
            assert os.getpgrp() != os.getpgid(os.getppid()), "the tests' own group would be killed"
            os.killpg(0, signal.SIGKILL)
        else:
            os.kill(os.getpid(), self.happens)


class Watch:
    """Counts and times all phases of this process, strikes at `moment`, and on request writes down what it saw."""

    def __init__(self, moment: Moment | None):
        self.moment, self.calls, self.seconds, self.lock = (
            moment,
            Counter[str](),
            dict[str, list[float]](),
            threading.Lock(),
        )
        for phase, names in PHASES.items():
            for name in names:
                owner, attribute = _owner(name)
                setattr(owner, attribute, self._watched(phase, getattr(owner, attribute)))

    def _watched(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*arguments: Any, **named: Any) -> Any:
            with self.lock:
                call = self.calls[phase]
                self.calls[phase] += 1
            if self.moment and (phase, call) == (self.moment.phase, self.moment.call):
                if self.moment.after:
                    threading.Timer(self.moment.after, self.moment.strike).start()
                else:
                    self.moment.strike()
            start = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds.setdefault(phase, []).append(time.perf_counter() - start)

        return watched

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.seconds))


def _owner(name: str) -> tuple[Any, str]:
    """The module or class that holds the name."""
    path, _, attribute = name.rpartition(".")
    try:
        return importlib.import_module(path), attribute
    except ModuleNotFoundError:
        module, _, kind = path.rpartition(".")
        return getattr(importlib.import_module(module), kind), attribute
