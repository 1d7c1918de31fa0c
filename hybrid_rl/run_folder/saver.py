"""Which checkpoints a run writes and keeps: one at a time, the last rl.keep_checkpoints of them, and the best one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hybrid_rl.config import Config
from hybrid_rl.machine import versions
from hybrid_rl.policy.critic import Critic
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.optimizer import Optimizer
from hybrid_rl.run_folder import checkpoint
from hybrid_rl.run_folder.metrics import Metrics
from hybrid_rl.run_folder.progress import Progress
from hybrid_rl.run_folder.rollouts import RolloutFiles


@dataclass(slots=True)
class Saver:
    folder: Path  # of the checkpoints
    config: Config
    policy: Policy
    metrics: Metrics
    progress: Progress
    rollouts: RolloutFiles
    data: Mapping[str, str] = field(default_factory=dict)  # digests of the tasks and of the reward's source
    _saving: checkpoint.Saving | None = None  # the checkpoint that is being written

    def save(
        self, stage: str, step: int, optimizer: Optimizer | None = None, critic: Critic | None = None, **state: object
    ) -> None:
        """Write everything a later process needs to go on from here, the metrics written so far included. Collective.

        With checkpoint.background it is on the disk only after `publish`.
        """
        self.publish()  # one at a time
        self.rollouts.flush()  # a run that goes on from here repeats none of the steps before, and misses none of their files
        shared = {
            **self.progress.state(),
            "metrics_lines": self.metrics.lines,
            "versions": versions(),
            "data": self.data,
        }
        roles = {}
        if critic:
            critic.unpark()  # a step without a signal had no use for it
            roles["critic"] = critic.model, critic.optimizer
        with self.progress.clock.timed("checkpoint"):
            self.metrics.sync()  # a checkpoint's lines are never fewer than it says, whatever happens to the machine
            self._saving = checkpoint.begin(
                self.folder, stage, step, self.policy, optimizer, {**shared, **state}, roles
            )
        if not self.config.checkpoint.background:
            self.publish()

    def publish(self, wait: bool = True) -> None:
        """Make the checkpoint that is being written count, if there is one; without `wait` only if it is written.

        Collective.
        """
        if self._saving and (wait or self._saving.ready()):
            saving, self._saving = self._saving, None
            with self.progress.clock.timed("checkpoint"):
                saving.publish(self.config.rl.keep_checkpoints, self.best, self.config.checkpoint.timeout)

    @property
    def best(self) -> str | None:
        """The name of the best checkpoint's folder."""
        return f"rl_{self.progress.best['step']:06.0f}" if self.progress.best else None

    def prune(self) -> None:
        """Remove the checkpoints that are not to be kept: the last evaluation may have found a better one.

        Rank 0 alone.
        """
        checkpoint.prune(self.folder, self.config.rl.keep_checkpoints, self.best)
