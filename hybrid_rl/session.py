"""What the stages of one run share: the policy, the engine, the tasks, the scorer, and where the run is written.

Every rank has one; rank 0's metrics, rollouts and lines are the ones that are written and shown.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

import numpy as np
import torch

from hybrid_rl.config import Config, EngineKind
from hybrid_rl.data import TaskSets
from hybrid_rl.engine.base import Engine, EngineDied, EngineError
from hybrid_rl.engine.make import choose_engine
from hybrid_rl.handover import hand_over
from hybrid_rl.machine import versions
from hybrid_rl.policy.critic import Critic
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.offload import release_cached
from hybrid_rl.policy.optimizer import Optimizer
from hybrid_rl.processes import hangs, signals
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.report.console import Console
from hybrid_rl.rollout.generate import request_seed
from hybrid_rl.rollout.rewards import Scorer
from hybrid_rl.run_folder import checkpoint
from hybrid_rl.run_folder.metrics import Metrics
from hybrid_rl.run_folder.rollouts import remove_old, write_rollouts
from hybrid_rl.types import Group


@dataclass(slots=True)
class Session:
    config: Config
    folder: Path
    model_folder: Path
    policy: Policy
    engine: Engine
    tasks: TaskSets
    scorer: Scorer
    metrics: Metrics
    console: Console
    resumed: checkpoint.Checkpoint | None = None
    data: dict[str, str] = field(default_factory=dict)  # digests of the tasks and of the reward's source
    version: int = 0  # of the policy's weights: the number of RL updates they have seen
    trained_steps: int = 0  # RL steps with an update
    empty_steps: int = 0  # RL steps in a row, up to the last one, without a gradient to train on
    engine_restarts: int = 0  # times that dead engines were started again
    evaluations: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] | None = None  # step and reward of RL's best evaluation, where rl.keep_best asks for it
    saving: checkpoint.Saving | None = None  # the checkpoint that is being written
    seconds: dict[str, float] = field(default_factory=dict)  # of what has ended; a resumed run's go on
    running: dict[str, float] = field(default_factory=dict)  # when what goes on now began

    @property
    def ranks(self) -> Ranks:
        return self.policy.ranks

    @property
    def data_seed(self) -> int:
        """Of the order in which tasks are drawn."""
        return self.config.seed if self.config.data_seed is None else self.config.data_seed

    @property
    def engine_kind(self) -> EngineKind:
        return choose_engine(self.config.engine.kind, self.policy.device)

    def hand_over(self, optimizer: Optimizer | None = None, verify: bool = False) -> None:
        """The policy's weights to the engine, which is awake then; to a new one where it turns out to be dead. Collective."""
        while True:
            try:
                size = self.config.handover.bucket_mib * 2**20
                hand_over(self.policy, self.engine, self.version, optimizer, verify=verify, bucket_bytes=size)
                return
            except EngineDied as error:
                self._restart_engine(error, optimizer)
                verify = True

    def revive_engine(self, error: EngineDied) -> None:
        """While an engine samples, it died: a new one with the current weights takes its place. Collective."""
        self._restart_engine(error)
        self.hand_over(verify=True)

    def _restart_engine(self, error: EngineDied, optimizer: Optimizer | None = None) -> None:
        """Raises EngineError where that was done engine.restarts times already."""
        allowed = self.config.engine.restarts
        if self.engine_restarts >= allowed:
            raise EngineError(f"the engine died {allowed + 1} times, and engine.restarts={allowed}; {error}")
        self.engine_restarts += 1
        self.console.say(f"engine restarted ({self.engine_restarts} of {allowed} times): {str(error).splitlines()[0]}")
        self.policy.park()  # a new engine takes its memory at once, so the trainer's part must not lie there
        if optimizer is not None:
            optimizer.park()
        release_cached(self.policy.device)
        self.ranks.on_all(self.engine.restart)
        self.ranks.on_all(self.engine.sleep)
        self.policy.unpark()

    def resumed_step(self, stage: str) -> int:
        """The step that this stage goes on after; 0 to begin it."""
        return self.resumed.state["step"] if self.resumed and self.resumed.state["stage"] == stage else 0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        self.running[name] = time.perf_counter()
        with hangs.phase(name):
            yield
        self.seconds[name] = self.spent()[name]
        del self.running[name]

    def spent(self) -> dict[str, float]:
        """Seconds by stage so far, what still goes on included."""
        now = time.perf_counter()
        return self.seconds | {name: self.seconds.get(name, 0.0) + now - began for name, began in self.running.items()}

    def count_step(self, nothing: str | None) -> None:
        """Note whether an RL step trained something. A step skipped for a non-finite number counts as neither: policy.max_bad_steps has it."""
        if nothing is None:
            self.trained_steps, self.empty_steps = self.trained_steps + 1, 0
        elif nothing != "not_finite":
            self.empty_steps += 1

    def save_rollouts(
        self, name: str, groups: Sequence[Group], advantages: Mapping[tuple[int, int], float] = MappingProxyType({}),
        trained: Collection[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        """rollouts/<name>.parquet: advantages, and `trained` rollouts that an update used, by (group id, index)."""
        if self.ranks.main:
            self.write_rollouts(self.folder / "rollouts" / f"{name}.parquet", groups, advantages, trained)

    def remove_old_rollouts(self, step: int) -> None:
        """Those of RL steps that rollout.keep_steps does not keep."""
        if self.ranks.main:
            remove_old(self.folder / "rollouts", step, self.config.rollout.keep_steps)

    def write_rollouts(
        self, path: Path, groups: Sequence[Group], advantages: Mapping[tuple[int, int], float] = MappingProxyType({}),
        trained: Collection[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        """As save_rollouts, to any file and on every rank that calls."""
        prompts = [
            str(self.policy.tokenizer.decode(g.rollouts[0].token_ids[: g.rollouts[0].prompt_length])) for g in groups
        ]
        write_rollouts(path, groups, prompts, advantages, trained)

    def seed_step(self, stage: str, step: int) -> None:
        """Random numbers that a step draws (no part of hybrid_rl does; a recipe's may) follow from the seed and the step, the same on every
        rank: a resumed run draws them again without any generator's state."""
        number = request_seed(self.config.seed, stage, step)
        random.seed(number)
        np.random.seed(number % 2**32)
        torch.manual_seed(number)

    # ---- checkpoints, and where a run may end ----------------------------------------------------------------------------------

    def save_checkpoint(
        self, stage: str, step: int, optimizer: Optimizer | None, critic: Critic | None = None, **state: object
    ) -> None:
        """Everything a later process needs to go on from here, the metrics written so far included. Collective.

        With checkpoint.background it is on the disk only after publish_checkpoint.
        """
        self.publish_checkpoint()  # one at a time
        shared = {
            "version": self.version, "metrics_lines": self.metrics.lines, "evaluations": self.evaluations, "best": self.best,
            "trained_steps": self.trained_steps, "empty_steps": self.empty_steps, "seconds": self.spent(), "versions": versions(),
            "data": self.data,
        }  # fmt: skip
        roles = {}
        if critic:
            critic.unpark()  # a step without a signal had no use for it
            roles["critic"] = critic.model, critic.optimizer
        with self.timed("checkpoint"):
            self.metrics.sync()  # a checkpoint's lines are never fewer than it says, whatever happens to the machine
            self.saving = checkpoint.begin(
                self.folder / "checkpoints", stage, step, self.policy, optimizer, {**shared, **state}, roles
            )
        if not self.config.checkpoint.background:
            self.publish_checkpoint()

    def publish_checkpoint(self, wait: bool = True) -> None:
        """Make the checkpoint that is being written count, if there is one; without `wait` only where it is written. Collective."""
        if self.saving and (wait or self.saving.ready()):
            saving, self.saving = self.saving, None
            with self.timed("checkpoint"):
                saving.publish(self.config.rl.keep_checkpoints, self.best_checkpoint, self.config.checkpoint.timeout)

    @property
    def best_checkpoint(self) -> str | None:
        """The name of its folder."""
        return f"rl_{self.best['step']:06.0f}" if self.best else None

    def stop_asked(self) -> int:
        """The signal that asked any rank to stop, 0 for none; the same on every rank. Collective."""
        return self.ranks.largest(signals.asked())

    def stop(self, number: int, where: str) -> NoReturn:
        """End the run, saved as it is. Collective."""
        self.publish_checkpoint()
        raise signals.Stopped(number, f"{where}; resume={self.folder} goes on from there")
