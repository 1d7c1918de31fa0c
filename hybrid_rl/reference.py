"""The reference: the model that the policy's distance is measured from while RL moves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from hybrid_rl import checkpoint
from hybrid_rl.config import Offload
from hybrid_rl.config import Reference as Kind
from hybrid_rl.memory import Parked
from hybrid_rl.policy import lora
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.sharding import local
from hybrid_rl.session import Session


@dataclass(slots=True)
class Reference:
    """`model` is the policy itself (its base, without adapters) or a frozen copy, which waits in host memory while idle."""

    model: Policy
    is_policy: bool
    parked: Parked | None = None

    @contextmanager
    def awake(self) -> Iterator[Policy]:
        """The model to score with, on the device. Collective."""
        if self.is_policy:
            with lora.disabled(self.model.model):
                yield self.model
            return
        if self.parked:
            self.parked.bring_back()
        yield self.model
        self.park()

    def park(self) -> None:
        """On a GPU always; on the CPU where policy.offload says so, and not on one rank, whose parameters lie in a mapped file."""
        model = self.model
        if model.device.type != "cpu" or (model.settings.offload == Offload.all and model.ranks.world > 1):
            self.parked = Parked(local(p) for p in model.parameters.values())


def make_reference(s: Session, start: int) -> Reference | None:
    """As algo.reference says. A frozen copy is of the policy before the first RL step; it is kept on the disk for a run that is resumed later."""
    kind, policy = s.config.algo.reference, s.policy
    if kind == Kind.none:
        return None
    if kind == Kind.base:
        return Reference(policy, is_policy=True)
    copy = Policy.load(s.model_folder, policy.device, replace(policy.settings, activation_checkpointing=False), policy.ranks)
    root = s.folder / "checkpoints" / "reference"
    if start:
        saved = s.ranks.from_main(lambda: checkpoint.latest(root))
        if saved is None:
            raise checkpoint.CheckpointError(f"algo.reference=frozen: {root} holds no complete reference; it was written when RL began")
        saved.restore_policy(copy)
    else:
        with torch.no_grad():
            for name, parameter in policy.parameters.items():
                local(copy.parameters[name]).copy_(local(parameter))
        checkpoint.save(root, "rl", 0, copy, None, {}, keep=1)
    for parameter in copy.parameters.values():
        parameter.requires_grad_(False)
    reference = Reference(copy, is_policy=False)
    reference.park()
    return reference
