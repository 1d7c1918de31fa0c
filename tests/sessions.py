"""A session of a model that is loaded already, as `build` makes one of a whole run."""

from __future__ import annotations

from pathlib import Path

from hybrid_rl.config import Config
from hybrid_rl.data import TaskSets
from hybrid_rl.engine.base import Engine
from hybrid_rl.handover import Handover
from hybrid_rl.policy.model import Policy
from hybrid_rl.report.console import Console
from hybrid_rl.rollout.rewards import Scorer
from hybrid_rl.run_folder.checkpoint import Checkpoint
from hybrid_rl.run_folder.metrics import Metrics
from hybrid_rl.run_folder.progress import Progress
from hybrid_rl.run_folder.rollouts import RolloutFiles
from hybrid_rl.run_folder.saver import Saver
from hybrid_rl.session import Session


def make_session(
    config: Config,
    folder: Path,
    policy: Policy,
    engine: Engine | None = None,
    tasks: TaskSets | None = None,
    scorer: Scorer | None = None,
    *,
    resumed: Checkpoint | None = None,
    metrics: Metrics | None = None,
    quiet: bool = False,
) -> Session:
    """Without engine, tasks or scorer the session is for what needs none."""
    main, progress = policy.ranks.main, Progress()
    keep_lines = resumed.state["metrics_lines"] if resumed else 0
    metrics = metrics or Metrics(folder / "metrics.jsonl" if main else None, keep_lines)
    console = Console(quiet=quiet or not main)
    if resumed:
        progress.restore(resumed.state)
    rollouts = RolloutFiles(folder / "rollouts", policy.tokenizer, main, config.rollout.keep_steps)
    return Session(
        config=config,
        folder=folder,
        policy=policy,
        handover=Handover(policy, engine, config.handover.bucket_mib * 2**20, config.engine.restarts, console.say),  # type: ignore[arg-type]
        tasks=tasks or TaskSets([], [], []),
        scorer=scorer,  # type: ignore[arg-type]
        console=console,
        metrics=metrics,
        rollouts=rollouts,
        progress=progress,
        saver=Saver(folder / "checkpoints", config, policy, metrics, progress, rollouts),
        resumed=resumed,
    )
