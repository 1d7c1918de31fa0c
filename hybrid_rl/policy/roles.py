"""Models beside the policy: the reference that its distance is measured from, the teacher it learns from, the critic that learns with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from hybrid_rl.config import LoraConfig, Offload, PolicyConfig
from hybrid_rl.config import Reference as Kind
from hybrid_rl.model_folder.read import ModelError
from hybrid_rl.policy import lora
from hybrid_rl.policy.critic import Critic, ValueModel
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.offload import Parked
from hybrid_rl.policy.optimizer import make_optimizer
from hybrid_rl.policy.sharding import local
from hybrid_rl.run_folder import checkpoint
from hybrid_rl.session import Session

P = TypeVar("P", bound=Policy)


@dataclass(slots=True)
class Frozen:
    """`model` is the policy itself (its base, without adapters) or a model of its own, which waits in host memory while idle."""

    model: Policy
    is_policy: bool = False
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


def make_reference(s: Session, start: int) -> Frozen | None:
    """As algo.reference says. A frozen copy is of the policy before the first RL step; it is kept on the disk for a run that is resumed later."""
    kind, policy = s.config.algo.reference, s.policy
    if kind == Kind.none:
        return None
    if kind == Kind.base:
        return Frozen(policy, is_policy=True)
    copy = Policy.load(s.model_folder, policy.device, replace(policy.settings, activation_checkpointing=False), policy.ranks)
    root = s.folder / "checkpoints" / "reference"
    if start:
        saved = s.policy.ranks.from_main(lambda: checkpoint.latest(root))
        if saved is None:
            raise checkpoint.CheckpointError(f"algo.reference=frozen: {root} holds no complete reference; it was written when RL began")
        saved.restore_policy(copy)
    else:
        with torch.no_grad():
            for name, parameter in policy.parameters.items():
                local(copy.parameters[name]).copy_(local(parameter))
        checkpoint.save(root, "rl", 0, copy, None, {}, keep=1, timeout=s.config.checkpoint.timeout)
    return _frozen(copy)


def make_teacher(s: Session) -> Frozen:
    """The model in algo.teacher's folder. Raises ModelError where it does not mean the same tokens by the same ids as the policy."""
    assert s.config.algo.teacher is not None
    settings = replace(s.policy.settings, activation_checkpointing=False, lora=LoraConfig())
    return _frozen(_load(Policy, "algo.teacher", s.config.algo.teacher, s.policy, settings))


def make_critic(s: Session, steps: int) -> Critic:
    """As algo.critic says, its optimizer for `steps` updates. It begins as the policy is before the first RL step, or as a folder's model.

    A resumed run's comes from the checkpoint, which must hold one. Raises CheckpointError, and ModelError as make_teacher does.
    """
    chosen, policy, start = s.config.algo.critic, s.policy, s.resumed_step("rl")
    settings = replace(policy.settings, lora=LoraConfig())
    if chosen.path:
        model = _load(ValueModel, "algo.critic.path", chosen.path, policy, settings)
    else:
        model = ValueModel.load(s.model_folder, policy.device, settings, policy.ranks)
        if not start:
            model.begin_as(policy)
    optimizer = make_optimizer(model, chosen.optimizer, steps)
    optimizer.offload |= policy.device.type != "cpu"  # on a GPU the moments wait with the weights
    if s.resumed and start:
        s.resumed.restore_role("critic", model, optimizer)
    critic = Critic(model, optimizer, chosen.clip)
    critic.park()
    return critic


def _load(kind: type[P], setting: str, folder: str, policy: Policy, settings: PolicyConfig) -> P:
    """A model of another folder. Raises ModelError where it does not mean the same tokens by the same ids as the policy."""
    try:
        model = kind.load(folder, policy.device, settings, policy.ranks)
    except ModelError as error:
        raise ModelError(str(error).replace("model.path=", f"{setting}=")) from error
    if model.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise ModelError(f"{setting}={folder}: its tokenizer is not the policy's, so its numbers would be of other tokens")
    return model


def _frozen(model: Policy) -> Frozen:
    for parameter in model.parameters.values():
        parameter.requires_grad_(False)
    frozen = Frozen(model)
    frozen.park()
    return frozen
