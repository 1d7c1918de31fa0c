"""Batches with a number that is not finite, kept for `python -m hybrid_rl.replay`.

bad/step_000012/  rollouts.parquet     the batch; batch.json says which of its rollouts the update had
                  numbers.safetensors  what the update was given of each rollout [R] or sampled token [N]
                  batch.json           the fault, and what else replaying needs
                  config.yaml
                  weights_000012/      as in a checkpoint, without moments: those that the numbers were computed with
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import Tensor

from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.numbers import Fault, agreed
from hybrid_rl.run_folder import checkpoint
from hybrid_rl.run_folder.files import write_json, write_text
from hybrid_rl.session import Session
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


def keep(s: Session, bad: BadBatch, fault: Fault, model: Policy) -> None:
    """Name the fault on the console, and write the batch unless the run has already kept enough. Collective.

    `model` is the one whose numbers they are.
    """
    folder = model.folder
    fault = agreed(s.ranks, fault)
    name = f"{'sft' if bad.kind == 'sft' else 'step'}_{bad.step:06d}"
    root = s.folder / "bad"
    said = f"{'SFT ' if bad.kind == 'sft' else ''}step {bad.step}: {fault}; the update is skipped"
    if s.ranks.from_main(lambda: (root / name).exists() or len(list(root.glob("*/batch.json"))) >= MOST):
        s.console.say(said)
        return
    checkpoint.save(root / name, "weights", bad.step, model, None, {}, keep=1, timeout=s.config.checkpoint.timeout)
    last = s.ranks.from_main(lambda: checkpoint.complete(s.folder / "checkpoints"))
    if s.ranks.main:
        s.write_rollouts(root / name / "rollouts.parquet", bad.groups)
        columns = {what: column.detach().cpu().contiguous().clone() for what, column in bad.columns.items()}
        save_file(columns, root / name / "numbers.safetensors")
        write_text(root / name / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(s.config)))
        inside = folder.resolve().is_relative_to(s.folder.resolve())
        facts = {
            "kind": bad.kind, "step": bad.step, "version": s.version, "fault": {**asdict(fault), "value": str(fault.value)},
            "chosen": list(bad.chosen), "columns": list(columns), "layout": model.layout, "ranks": s.ranks.world,
            "model": str(folder.resolve().relative_to(s.folder.resolve()) if inside else folder.resolve()),
            "checkpoint": last[-1].name if last else None, **bad.facts,
        }  # fmt: skip
        write_json(root / name / "batch.json", facts)
    loss = str(s.config.algo.loss.get("_target_"))
    own = "" if loss.startswith("hybrid_rl.algo.") else f" --loss {loss}"
    s.console.say(f"{said}; the batch is kept: python -m hybrid_rl.replay {root / name}{own}")


def as_groups(demonstrations: Sequence[Rollout]) -> list[Group]:
    """Demonstrations in the form of groups of one, numbered."""
    groups = []
    for i, demonstration in enumerate(demonstrations):
        rollout = copy.copy(demonstration)
        rollout.group_id = i
        groups.append(Group(i, Task(rollout.task_id, ({"role": "user", "content": ""},), ""), [rollout]))
    return groups
