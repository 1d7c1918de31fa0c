"""Batches with a non-finite number, kept for `python -m hybrid_rl.replay`.

bad/step_000012/  rollouts.parquet     the batch; batch.json says which of its rollouts the update had
                  numbers.safetensors  what the update was given of each rollout [R] or sampled token [N]
                  batch.json           the fault, and what else replaying needs
                  config.yaml
                  weights_000012/      as in a checkpoint, without moments: those that the numbers were computed with
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import Tensor

from hybrid_rl.config import Config
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.numbers import Fault, agreed
from hybrid_rl.run_folder import checkpoint
from hybrid_rl.run_folder.files import write_json, write_text
from hybrid_rl.run_folder.progress import Progress
from hybrid_rl.run_folder.rollouts import prompts_of, write_rollouts
from hybrid_rl.types import Group, Rollout, Task

MOST = 3  # batches that a run keeps: each costs the disk as much as the weights


@dataclass(slots=True)
class BadBatch:
    """`kind` is where the fault showed: "scored" before any update, "policy" or "critic" in its update, "sft".

    `chosen` are the numbers of the rollouts, among all of `groups`, that `columns` are of.
    """

    kind: str
    step: int
    groups: Sequence[Group]
    chosen: Sequence[int]
    columns: Mapping[str, Tensor]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BadBatches:
    """Where a run keeps its bad batches: under bad/ in `folder`."""

    folder: Path  # of the run
    config: Config
    progress: Progress
    say: Callable[[str], None]

    def keep(self, bad: BadBatch, fault: Fault, model: Policy) -> None:
        """Name the fault, and write the batch unless the run has already kept enough. Collective.

        `model` is the one whose numbers they are.
        """
        ranks = model.ranks
        fault = agreed(ranks, fault)
        name = f"{'sft' if bad.kind == 'sft' else 'step'}_{bad.step:06d}"
        kept = self.folder / "bad" / name
        said = f"{'SFT ' if bad.kind == 'sft' else ''}step {bad.step}: {fault}; the update is skipped"
        if ranks.from_main(lambda: kept.exists() or len(list(kept.parent.glob("*/batch.json"))) >= MOST):
            self.say(said)
            return
        timeout = self.config.checkpoint.timeout
        checkpoint.begin(kept, "weights", bad.step, model, None, {}).publish(keep=1, timeout=timeout)
        last = ranks.from_main(lambda: checkpoint.complete(self.folder / "checkpoints"))
        if ranks.main:
            facts = {
                "kind": bad.kind,
                "step": bad.step,
                "version": self.progress.version,
                "fault": {**asdict(fault), "value": str(fault.value)},
                "chosen": list(bad.chosen),
                "columns": list(bad.columns),
                "layout": model.layout,
                "ranks": ranks.world,
                "model": self._named(model.folder.resolve()),
                "checkpoint": last[-1].name if last else None,
                **bad.facts,
            }
            self._write(kept, bad, facts, prompts_of(bad.groups, model.tokenizer))
        loss = str(self.config.algo.loss.get("_target_"))
        own = "" if loss.startswith("hybrid_rl.algo.") else f" --loss {loss}"
        self.say(f"{said}; the batch is kept: python -m hybrid_rl.replay {kept}{own}")

    def _named(self, folder: Path) -> str:
        """Name a model's folder, one inside the run relative to it."""
        run = self.folder.resolve()
        return str(folder.relative_to(run) if folder.is_relative_to(run) else folder)

    def _write(self, kept: Path, bad: BadBatch, facts: dict[str, Any], prompts: Sequence[str]) -> None:
        """Write the files beside the weights; batch.json, which makes the batch count, comes last."""
        write_rollouts(kept / "rollouts.parquet", bad.groups, prompts, {}, ())
        columns = {what: column.detach().cpu().contiguous().clone() for what, column in bad.columns.items()}
        save_file(columns, kept / "numbers.safetensors")
        write_text(kept / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(self.config)))
        write_json(kept / "batch.json", facts)


def as_groups(demonstrations: Sequence[Rollout]) -> list[Group]:
    """Demonstrations in the form of groups of one, numbered."""
    groups = []
    for i, demonstration in enumerate(demonstrations):
        rollout = copy.copy(demonstration)
        rollout.group_id = i
        groups.append(Group(i, Task(rollout.task_id, ({"role": "user", "content": ""},), ""), [rollout]))
    return groups
