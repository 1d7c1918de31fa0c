"""Models beside the policy: the reference of its KL, the teacher to learn from, and the critic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from hybrid_rl.algo.batch import RECOMPUTED, REFERENCE, TEACHER, VALUE
from hybrid_rl.config import CriticConfig, LoraConfig, PolicyConfig
from hybrid_rl.config import Reference as Kind
from hybrid_rl.model_folder.read import ModelError
from hybrid_rl.policy import lora
from hybrid_rl.policy.critic import Critic, ValueModel
from hybrid_rl.policy.model import Policy, SideModel
from hybrid_rl.policy.numbers import Fault, alone, find
from hybrid_rl.policy.optimizer import Optimizer, make_optimizer
from hybrid_rl.policy.sharding import local
from hybrid_rl.policy.update import score
from hybrid_rl.types import Rollout

P = TypeVar("P", bound=Policy)


@dataclass(slots=True)
class Frozen:
    """A model that scores and is never trained: a separate one, or the policy without its adapters (`is_policy`)."""

    model: Policy
    is_policy: bool = False

    @contextmanager
    def awake(self) -> Iterator[Policy]:
        """Yield the model to score with, on the device. Collective."""
        if self.is_policy:
            with lora.disabled(self.model.model):
                yield self.model
            return
        self.model.unpark()
        yield self.model
        self.model.park()


@dataclass(slots=True)
class Roles:
    """Every model that computes numbers of a batch. All calls are collective."""

    policy: Policy
    temperature: float  # of the sampling
    reference: Frozen | None = None
    teacher: Frozen | None = None
    critic: Critic | None = None

    def column(self, what: str, rollouts: Sequence[Rollout]) -> Tensor:
        """Return the column of this name for all N sampled tokens, [N] float32."""
        if what == VALUE:
            assert self.critic is not None
            return self.critic.values(rollouts)
        role = {RECOMPUTED: None, REFERENCE: self.reference, TEACHER: self.teacher}[what]
        with role.awake() if role else nullcontext(self.policy) as model:
            return score(model, rollouts, self.temperature)

    def columns(self, parts: Sequence[Sequence[Rollout]], recompute: bool) -> dict[str, Tensor]:
        """Return the column of every model that exists, the policy's own if `recompute`.

        Each part is scored in the same rows as its update, so that equal weights give equal numbers to the bit.
        """
        there = {RECOMPUTED: recompute, REFERENCE: self.reference, TEACHER: self.teacher, VALUE: self.critic}
        return {what: torch.cat([self.column(what, part) for part in parts]) for what, model in there.items() if model}

    def locate(self, columns: Mapping[str, Tensor], rollouts: Sequence[Rollout]) -> Fault:
        """Return the first non-finite number of the columns, and the sample that caused it."""
        fault = find(columns, rollouts)
        assert fault is not None
        if fault.what not in (RECOMPUTED, REFERENCE, TEACHER, VALUE):
            return fault
        return alone(fault, lambda r: self.column(fault.what, r), rollouts)


def make_reference(
    policy: Policy,
    kind: Kind,
    folder: Path,
    restore: Callable[[Policy], object] | None,
    save: Callable[[Policy], object],
) -> Frozen | None:
    """Return the reference that algo.reference names, None for `none`. Collective.

    A frozen copy of the policy before the first RL step is a model loaded from `folder`, with the policy's weights,
    which `save` keeps; a resumed run gives `restore`, which reads them again.
    """
    if kind == Kind.none:
        return None
    if kind == Kind.base:
        return Frozen(policy, is_policy=True)
    copy = SideModel.load(folder, policy.device, replace(policy.settings, activation_checkpointing=False), policy.ranks)
    if restore:
        restore(copy)
    else:
        with torch.no_grad():
            for name, parameter in policy.parameters.items():
                local(copy.parameters[name]).copy_(local(parameter))
        save(copy)
    return _frozen(copy)


def make_teacher(policy: Policy, folder: str) -> Frozen:
    """Load the model in algo.teacher's folder. Raises ModelError if its vocabulary is not the policy's."""
    settings = replace(policy.settings, activation_checkpointing=False, lora=LoraConfig())
    return _frozen(_load(SideModel, "algo.teacher", folder, policy, settings))


def make_critic(
    policy: Policy,
    config: CriticConfig,
    folder: Path,
    updates: int,
    restore: Callable[[ValueModel, Optimizer], object] | None,
) -> Critic:
    """Return the critic that algo.critic describes, with an optimizer for `updates` steps. Collective.

    It begins as the model of config.path, or as the policy, whose folder is `folder`; a resumed run gives `restore`,
    which reads weights and moments. Raises ModelError as make_teacher does.
    """
    settings = replace(policy.settings, lora=LoraConfig())
    if config.path:
        model = _load(ValueModel, "algo.critic.path", config.path, policy, settings)
    else:
        model = ValueModel.load(folder, policy.device, settings, policy.ranks)
        if not restore:
            model.begin_as(policy)
    optimizer = make_optimizer(model, config.optimizer, updates)
    optimizer.offload |= policy.device.type != "cpu"  # on a GPU the moments wait with the weights
    if restore:
        restore(model, optimizer)
    critic = Critic(model, optimizer, config.clip)
    critic.park()
    return critic


def _load(kind: type[P], setting: str, folder: str, policy: Policy, settings: PolicyConfig) -> P:
    """Load the model of another folder. Raises ModelError if its vocabulary is not the policy's."""
    try:
        model = kind.load(folder, policy.device, settings, policy.ranks)
    except ModelError as error:
        raise ModelError(str(error).replace("model.path=", f"{setting}=")) from error
    if model.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise ModelError(
            f"{setting}={folder}: its tokenizer is not the policy's, so its numbers would be of other tokens"
        )
    return model


def _frozen(model: Policy) -> Frozen:
    for parameter in model.parameters.values():
        parameter.requires_grad_(False)
    model.park()
    return Frozen(model)
