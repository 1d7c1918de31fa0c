"""What the stages of one run share: the policy, the engine, the tasks, the scorer, and where the run is written.

Every rank has one; rank 0's metrics, rollouts and lines are the ones that are written and shown.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch

from hybrid_rl import checkpoint
from hybrid_rl.config import Config, EngineKind, LayoutKind, Offload, OptimizerConfig
from hybrid_rl.console import Console
from hybrid_rl.data import TaskSets
from hybrid_rl.engine.base import Engine, EngineError
from hybrid_rl.engine.local import LocalEngine
from hybrid_rl.engine.sglang import SGLangEngine
from hybrid_rl.metrics import Metrics
from hybrid_rl.policy.critic import Critic
from hybrid_rl.policy.layout import Layout
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.optimizer import Optimizer
from hybrid_rl.ranks import Ranks
from hybrid_rl.rollout.reward import Scorer
from hybrid_rl.rollout.store import write_rollouts
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
    version: int = 0  # of the policy's weights: the number of RL updates they have seen
    evaluations: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # of what has ended; a resumed run's go on
    running: dict[str, float] = field(default_factory=dict)  # when what goes on now began

    @property
    def ranks(self) -> Ranks:
        return self.policy.ranks

    @property
    def engine_kind(self) -> EngineKind:
        return choose_engine(self.config.engine.kind, self.policy.device)

    @property
    def layout(self) -> Layout:
        return choose_layout(self.config.policy.layout, self.policy.device)

    def resumed_step(self, stage: str) -> int:
        """The step that this stage goes on after; 0 to begin it."""
        return self.resumed.state["step"] if self.resumed and self.resumed.state["stage"] == stage else 0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        self.running[name] = time.perf_counter()
        yield
        self.seconds[name] = self.spent()[name]
        del self.running[name]

    def spent(self) -> dict[str, float]:
        """Seconds by stage so far, what still goes on included."""
        now = time.perf_counter()
        return self.seconds | {name: self.seconds.get(name, 0.0) + now - began for name, began in self.running.items()}

    def save_rollouts(
        self, name: str, groups: Sequence[Group], advantages: Mapping[tuple[int, int], float] = MappingProxyType({}),
        trained: Collection[int] = (),
    ) -> None:  # fmt: skip
        """rollouts/<name>.parquet: advantages keyed by (group id, index), `trained` the ids of groups an update used."""
        if not self.ranks.main:
            return
        prompts = [str(self.policy.tokenizer.decode(g.rollouts[0].token_ids[: g.rollouts[0].prompt_length])) for g in groups]
        write_rollouts(self.folder / "rollouts" / f"{name}.parquet", groups, prompts, advantages, trained)

    def save_checkpoint(self, stage: str, step: int, optimizer: Optimizer | None, critic: Critic | None = None, **state: object) -> None:
        """Everything a later process needs to go on from here, the metrics written so far included. Collective."""
        shared = {"version": self.version, "metrics_lines": self.metrics.lines, "evaluations": self.evaluations, "seconds": self.spent()}
        root, keep = self.folder / "checkpoints", self.config.rl.keep_checkpoints
        roles = {}
        if critic:
            critic.unpark()  # a step without a signal had no use for it
            roles["critic"] = critic.model, critic.optimizer
        with self.timed("checkpoint"):
            checkpoint.save(root, stage, step, self.policy, optimizer, {**shared, **state}, keep, roles)


def choose_layout(kind: LayoutKind, device: torch.device) -> Layout:
    if kind == LayoutKind.auto:
        return "packed" if device.type == "cuda" else "trees"
    return kind.value


ENGINES = {EngineKind.local: "samples from the policy's memory", EngineKind.sglang: "has its own copy of the weights"}


def choose_engine(kind: EngineKind, device: torch.device) -> EngineKind:
    if kind == EngineKind.auto:
        return EngineKind.sglang if device.type == "cuda" and importlib.util.find_spec("sglang") else EngineKind.local
    return kind


def make_engine(config: Config, policy: Policy, model_folder: Path) -> Engine:
    """The configured engine; one with memory of its own begins with the folder's weights. Collective."""
    chosen, capacity = config.engine, config.rollout.max_prompt_tokens + config.rollout.max_tokens
    if choose_engine(chosen.kind, policy.device) == EngineKind.local:
        return LocalEngine(policy.sampler, policy.end_ids(), chosen.slots, capacity, policy.device, policy.dtype)
    engine, problem = None, None
    try:
        engine = SGLangEngine(model_folder, policy.end_ids(), chosen.slots, capacity, policy.device, policy.dtype, chosen.memory_fraction)
    except EngineError as error:  # of this rank's process
        problem = error
    policy.ranks.agree(problem)
    assert engine is not None
    return engine


def make_optimizer(policy: Policy, config: OptimizerConfig, steps: int) -> Optimizer:
    """Of a stage with `steps` optimizer steps."""
    settings = policy.settings
    scaled, offload = policy.dtype == torch.float16, settings.offload != Offload.none
    return Optimizer(policy.trainable, config, steps, settings.max_bad_steps, scaled=scaled, offload=offload)
