"""Record how far a run has come and the time it took: part of its checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hybrid_rl.processes import hangs


class Clock:
    """Seconds by stage; a resumed run's go on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}  # of what has ended
        self._running: dict[str, float] = {}  # when what goes on now began

    def start(self, name: str, since: float) -> None:
        """Count a stage that began at `since` and has no end."""
        self._running[name] = since

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        self._running[name] = time.perf_counter()
        with hangs.phase(name):
            yield
        self.seconds[name] = self.spent()[name]
        del self._running[name]

    def spent(self) -> dict[str, float]:
        """Return the seconds by stage so far, those of what still goes on included."""
        now = time.perf_counter()
        return self.seconds | {name: self.seconds.get(name, 0.0) + now - began for name, began in self._running.items()}


@dataclass(slots=True)
class Progress:
    version: int = 0  # of the policy's weights: the number of RL updates they have seen
    trained_steps: int = 0  # RL steps with an update
    empty_steps: int = 0  # RL steps in a row, up to the last one, without a gradient to train on
    evaluations: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] | None = None  # step and reward of RL's best evaluation, if rl.keep_best asks for it
    clock: Clock = field(default_factory=Clock)

    def count_step(self, nothing: str | None) -> None:
        """Note whether an RL step trained.

        One skipped for a non-finite number counts as neither: policy.max_bad_steps has it.
        """
        if nothing is None:
            self.trained_steps, self.empty_steps = self.trained_steps + 1, 0
        elif nothing != "not_finite":
            self.empty_steps += 1

    def state(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "evaluations": self.evaluations,
            "best": self.best,
            "trained_steps": self.trained_steps,
            "empty_steps": self.empty_steps,
            "seconds": self.clock.spent(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.version, self.evaluations, self.best = state["version"], state["evaluations"], state["best"]
        self.trained_steps = state.get("trained_steps", 1)  # checkpoints of earlier versions do not count
        self.empty_steps = state.get("empty_steps", 0)
        self.clock.seconds = state["seconds"]
