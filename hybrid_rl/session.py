"""Hold what the stages of one run share, and build it.

Every rank has a session; only rank 0 writes files and prints.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import torch
from omegaconf import OmegaConf

from hybrid_rl.algo.contract import check_parts
from hybrid_rl.config import Config, data_config
from hybrid_rl.data import TaskSets
from hybrid_rl.data.prepare import environment_of, load, prepare
from hybrid_rl.data.render import Checked
from hybrid_rl.data.template import fix_template
from hybrid_rl.engine.base import KV_CACHE, WEIGHTS, Engine
from hybrid_rl.engine.make import Sampled, make_engine
from hybrid_rl.handover import Handover
from hybrid_rl.machine import cores
from hybrid_rl.model_folder.read import read_config
from hybrid_rl.model_folder.tokenizer import read_tokenizer
from hybrid_rl.policy import tiny
from hybrid_rl.policy.defaults import settled
from hybrid_rl.policy.model import Policy, pick_device
from hybrid_rl.policy.offload import release_cached
from hybrid_rl.policy.reward_model import RewardModel, check_reward_model
from hybrid_rl.policy.sharding import local
from hybrid_rl.preflight.budget import check_budget, check_lengths, later_bytes, measure
from hybrid_rl.processes import signals
from hybrid_rl.processes.hangs import phase
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.report.console import Console
from hybrid_rl.rollout.generate import Generator
from hybrid_rl.rollout.rewards import Scorer
from hybrid_rl.run_folder.checkpoint import Checkpoint
from hybrid_rl.run_folder.clock import read_clock, start_clock
from hybrid_rl.run_folder.files import remove, write_text
from hybrid_rl.run_folder.metrics import Metrics
from hybrid_rl.run_folder.progress import Progress
from hybrid_rl.run_folder.resume import check_data, digests
from hybrid_rl.run_folder.rollouts import RolloutFiles
from hybrid_rl.run_folder.saver import Saver

TINY_PARAMETERS = 10_000_000  # below this, more threads than one cost more than they give


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
        max_turns = self.config.rollout.max_turns if self.config.environment else 0
        return Generator(
            handover.engine, policy.tokenizer, self.scorer, policy.ranks, handover.revive, self.reward_model, max_turns
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


# ---- how it is built ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """What a run begins with, before anything of it is loaded. `notes` collects what a reader should know."""

    config: Config
    folder: Path
    console: Console
    ranks: Ranks
    scorer: Scorer
    resumed: Checkpoint | None
    notes: list[str]


def build(start: Start) -> Session:
    """Check the settings and data against the models and this machine, load the policy, make the engine. Collective."""
    config, folder, ranks, resumed = start.config, start.folder, start.ranks, start.resumed
    device = pick_device(config.device)
    with phase("algorithm check", loading=True):
        ranks.from_main(lambda: check_parts(config))
    tasks, data = _load_tasks(start)
    model_folder = Path(config.model.path) if config.model.path else folder / "base_model"
    if not config.model.path and resumed is None:
        ranks.from_main(lambda: _make_tiny(model_folder, config))
    config = ranks.from_main(lambda: settled(config, read_config(model_folder), device))
    now = ranks.from_main(lambda: read_clock(folder) if resumed else start_clock(folder))
    checked = ranks.from_main(lambda: _check_prompts(tasks, model_folder, config, now))
    sizes = ranks.from_main(lambda: measure(config, model_folder))
    if config.reward_model.path:
        ranks.from_main(lambda: check_reward_model(str(config.reward_model.path)))
    tasks = tasks.without(checked.dropped)
    start.notes.extend([*tasks.notes, *checked.notes])
    start.notes.extend(ranks.from_main(lambda: check_lengths(config, sizes, checked.longest)))
    ranks.from_main(lambda: check_budget(config, sizes, device, ranks, folder))
    with phase("reward check", loading=True):
        start.notes.extend(ranks.on_all(lambda: start.scorer.check([*tasks.rl, *tasks.eval])))
    torch.manual_seed(config.seed)  # adapters begin at random
    policy = Policy.load(model_folder, device, config.policy, ranks)
    fix_template(policy.tokenizer, data_config(config.data), now, environment_of(config).tools)
    threads = 1 if policy.parameter_count() < TINY_PARAMETERS else max(1, cores() // ranks.local_world)
    torch.set_num_threads(config.threads or threads)
    ranks.from_main(lambda: (folder / "rollouts").mkdir(parents=True, exist_ok=True))
    if resumed is None:
        ranks.from_main(
            lambda: write_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(start.config)))
        )
    keep_lines = resumed.state["metrics_lines"] if resumed else 0
    metrics = Metrics(folder / "metrics.jsonl" if ranks.main else None, keep_lines)
    of_reward = config.reward_model
    reward_model = ranks.on_all(lambda: RewardModel(of_reward, device)) if of_reward.path else None
    engine, progress = build_engine(config, policy, folder), Progress()
    rollouts = RolloutFiles(folder / "rollouts", policy.tokenizer, ranks.main, config.rollout.keep_steps)
    session = Session(
        config=config,
        folder=folder,
        policy=policy,
        handover=Handover(
            policy, engine, config.handover.bucket_mib * 2**20, config.engine.restarts, start.console.say
        ),
        tasks=tasks,
        scorer=start.scorer,
        console=start.console,
        metrics=metrics,
        rollouts=rollouts,
        progress=progress,
        saver=Saver(folder / "checkpoints", config, policy, metrics, progress, rollouts, data),
        resumed=resumed,
        reward_model=reward_model,
    )
    if resumed:
        ranks.on_all(lambda: engine.sleep([KV_CACHE, WEIGHTS]))  # a new one is awake; the run may go on with training
        resumed.restore_policy(policy)
        progress.restore(resumed.state)
        # it marks a finished run, and this one goes on
        ranks.from_main(lambda: (folder / "summary.json").unlink(missing_ok=True))
    return session


def build_engine(config: Config, policy: Policy, folder: Path | None = None) -> Engine:
    """Make the engine that samples from `policy`; its log goes to `folder`. Collective."""
    release_cached(policy.device)
    later = later_bytes(config, sum(local(p).numel() for p in policy.trainable.values()))
    model = Sampled(policy.folder, policy.sampler, policy.end_ids(), policy.device, policy.dtype, policy.ranks, later)
    return make_engine(config, model, folder)


def _load_tasks(start: Start) -> tuple[TaskSets, dict[str, str]]:
    """Return the task sets and their digests. Raise CheckpointError if a resumed run began with others."""
    tasks = load(start.config)
    data = start.ranks.from_main(lambda: digests(start.config, tasks))
    if start.resumed:
        start.notes.extend(check_data(start.resumed, data))
    return tasks, data


def _check_prompts(tasks: TaskSets, model_folder: Path, config: Config, now: datetime) -> Checked:
    """Check, before the model loads, that each task can be rendered and fits."""
    vocabulary = read_config(model_folder).get_text_config().vocab_size
    tools = environment_of(config).tools
    tokenizer = fix_template(read_tokenizer(model_folder), data_config(config.data), now, tools)
    return prepare(config, tasks, tokenizer, vocabulary)


def _make_tiny(folder: Path, config: Config) -> None:
    remove(folder)  # what a run killed before its first checkpoint left
    tiny.create(folder, config.model.tiny, config.seed)
