"""Hold what the stages of one run share. Every rank has a session; only rank 0 writes files and prints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hybrid_rl.config import Config
from hybrid_rl.data import TaskSets
from hybrid_rl.handover import Handover
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.reward_model import RewardModel
from hybrid_rl.processes import signals
from hybrid_rl.report.console import Console
from hybrid_rl.rollout.generate import Generator
from hybrid_rl.rollout.rewards import Scorer
from hybrid_rl.run_folder.checkpoint import Checkpoint
from hybrid_rl.run_folder.metrics import Metrics
from hybrid_rl.run_folder.progress import Progress
from hybrid_rl.run_folder.rollouts import RolloutFiles
from hybrid_rl.run_folder.saver import Saver


@dataclass(slots=True)
class Session:
    config: Config
    folder: Path
    policy: Policy
    handover: Handover
    tasks: TaskSets
    scorer: Scorer
    console: Console
    metrics: Metrics
    rollouts: RolloutFiles
    progress: Progress
    saver: Saver
    resumed: Checkpoint | None = None  # from which the run goes on
    reward_model: RewardModel | None = None

    @property
    def data_seed(self) -> int:
        """The seed of the order in which tasks are drawn."""
        return self.config.seed if self.config.data_seed is None else self.config.data_seed

    @property
    def generator(self) -> Generator:
        """What samples and scores groups of rollouts, for RL and for evaluations."""
        policy, handover = self.policy, self.handover
        return Generator(
            handover.engine, policy.tokenizer, self.scorer, policy.ranks, handover.revive, self.reward_model
        )

    def resumed_step(self, stage: str) -> int:
        """Return the step that this stage goes on after; 0 to begin it."""
        return self.resumed.state["step"] if self.resumed and self.resumed.state["stage"] == stage else 0

    def stop_asked(self) -> int:
        """Return the signal that asked any rank to stop, 0 for none; the same on every rank. Collective."""
        return self.policy.ranks.largest(signals.asked())

    def stop(self, number: int, where: str) -> NoReturn:
        """End the run, saved as it is. Collective."""
        self.saver.publish()
        raise signals.Stopped(number, f"{where}; resume={self.folder} goes on from there")
