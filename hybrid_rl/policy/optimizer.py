"""AdamW with clipping and a learning-rate schedule; steps with a non-finite number are skipped and counted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybrid_rl.config import Offload, OptimizerConfig, Schedule
from hybrid_rl.policy.numbers import GRADIENT, Fault
from hybrid_rl.policy.offload import Offloaded
from hybrid_rl.policy.sharding import local

if TYPE_CHECKING:
    from hybrid_rl.policy.model import Policy

MOMENTS = ("exp_avg", "exp_avg_sq")
FIRST_SCALE, SCALE_UP_AFTER = 2.0**16, 400


class TrainingDiverged(RuntimeError):
    """Raised if too many steps in a row had non-finite numbers, or the weights themselves are non-finite."""


@dataclass(slots=True)
class StepResult:
    grad_norm: float  # before clipping
    lr: float
    skipped: bool
    fault: Fault | None  # why it was skipped; None for an overflow in float16, which a smaller scale mends


class Optimizer(Offloaded):
    """AdamW of `policy.trainable`: plain or sharded float32 parameters by name, with float32 moments like them.

    `total_steps` is the length of the schedule and `steps` the place in it: each step advances it, and a caller with
    steps without an update sets it. `bad` counts skipped steps in a row. In float16, where small gradients would become
    0, the loss is multiplied by `scale` before backward; `scale` halves at every overflow and doubles after
    SCALE_UP_AFTER good steps.

    The moments exist from the beginning, as zeros: on a GPU they then lie together, not between the activations of the
    first step, and a run that has too little memory for them ends before it samples.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        total_steps: int,
        max_bad_steps: int,
        *,
        scaled: bool = False,
        offload: bool = False,
    ):
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.scaled, self.scale, self.good = scaled, FIRST_SCALE if scaled else 1.0, 0
        self.offload = offload
        self.config, self.total_steps, self.max_bad_steps = config, total_steps, max_bad_steps
        first, second = config.betas
        matrices = [p for p in self.parameters if p.dim() > 1]
        vectors = [p for p in self.parameters if p.dim() <= 1]  # norms and biases, which are not decayed
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(first, second),
            eps=config.eps,
            fused=True,
        )
        self.steps = 0
        self.bad = 0
        self.stepped = False  # the moments are more than zeros
        self._begin(self._zeros())

    def learning_rate(self) -> float:
        """Return the next step's rate: linear warm-up, then constant, or falling to final_lr · lr at the last step."""
        config, step = self.config, self.steps
        if step < config.warmup_steps:
            return config.lr * (step + 1) / config.warmup_steps
        span = max(1, self.total_steps - config.warmup_steps - 1)
        progress = min(1.0, (step - config.warmup_steps) / span)
        if config.schedule == Schedule.linear:
            return config.lr * (1 - (1 - config.final_lr) * progress)
        if config.schedule == Schedule.cosine:
            return config.lr * (config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * progress)))
        return config.lr

    def step(self) -> StepResult:
        """Clip the gradients, take a step, and clear them; skip the step if they are not finite."""
        lr = self.learning_rate()
        norm = self._clip()
        if finite := math.isfinite(norm):
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
            self.stepped = True
        overflow = (
            self.scaled and not finite and self.scale > 1
        )  # a smaller scale mends it, so it does not count as bad
        fault = None if finite or overflow else Fault(self._culprit(), norm)
        self.adamw.zero_grad()
        self.steps += 1
        self.bad = 0 if finite else self.bad + (not overflow)
        if self.scaled:
            self._rescale(finite)
        return StepResult(norm, lr, not finite, fault)

    def skip(self, fault: Fault) -> StepResult:
        """Count a step that is skipped because of `fault` in its batch, and clear the gradients."""
        lr = self.learning_rate()
        self.adamw.zero_grad()
        self.steps += 1
        self.bad += 1
        return StepResult(math.nan, lr, True, fault)

    def check(self, fault: Fault) -> None:
        """Raise TrainingDiverged after max_bad_steps bad steps in a row; `fault` is the last one's."""
        if self.bad >= self.max_bad_steps:
            raise TrainingDiverged(
                f"numbers were not finite {self.bad} steps in a row, the last: {fault}; lower the learning rate "
                f"({self.learning_rate():g}), or look at the batch (policy.max_bad_steps sets how many are allowed)"
            )

    def _clip(self) -> float:
        """Clip the gradients if their norm is finite. Return the norm over all ranks, before clipping."""
        if self.scale != 1.0:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / self.scale)
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if math.isfinite(value):
            nn.utils.clip_grads_with_norm_(self.parameters, self.config.max_grad_norm, norm)
        return value

    def _culprit(self) -> str:
        """Name the first parameter with a non-finite gradient, as far as this rank's rows show it."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.grad is not None and not bool(local(parameter.grad).isfinite().all()):
                return f"{GRADIENT} of {name}"
        return GRADIENT

    def _rescale(self, finite: bool) -> None:
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale = max(1.0, self.scale / 2)
        elif self.good % SCALE_UP_AFTER == 0:
            self.scale *= 2

    # ---- checkpoints and host memory ---------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return the moments, "<parameter>.exp_avg" and so on, sharded like their parameter; {} before a step."""
        return self._tensors() if self.stepped else {}

    def _tensors(self) -> dict[str, Tensor]:
        states = ((name, self.adamw.state.get(p, {})) for name, p in zip(self.names, self.parameters, strict=True))
        return {f"{name}.{key}": value for name, state in states for key, value in state.items()}

    def blank(self) -> dict[str, Tensor]:
        """Return zeros with the names and shapes of `tensors` after a step, to be filled from a checkpoint.

        Before the first step they are the moments themselves, so that no second set takes memory.
        """
        return self._zeros() if self.stepped else self._tensors()

    def _zeros(self) -> dict[str, Tensor]:
        named = dict(zip(self.names, self.parameters, strict=True))
        moments = {f"{name}.{key}": torch.zeros_like(p) for name, p in named.items() for key in MOMENTS}
        return moments | {f"{name}.step": torch.zeros((), device=p.device) for name, p in named.items()}

    def state(self) -> dict[str, float]:
        """Return the counters that belong to the moments."""
        return {"steps": self.steps, "bad": self.bad, "scale": self.scale, "good": self.good}

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, float]) -> None:
        """Continue with the moments `tensors`, empty if there was no step, and the counters of `state`."""
        self.stepped = bool(tensors)
        if tensors:
            self._begin(tensors)
        self.steps, self.bad, self.good = (int(state[name]) for name in ("steps", "bad", "good"))
        self.scale = state["scale"]

    def _begin(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in zip(self.names, self.parameters, strict=True):
            self.adamw.state[parameter] = {key: tensors[f"{name}.{key}"] for key in (*MOMENTS, "step")}

    def waits(self) -> bool:
        return self.offload

    def waiting(self) -> Iterator[Tensor]:
        return (local(t) for name, t in self._tensors().items() if not name.endswith(".step"))


def make_optimizer(policy: Policy, config: OptimizerConfig, steps: int) -> Optimizer:
    """Make the optimizer of a stage with `steps` optimizer steps."""
    settings = policy.settings
    scaled, offload = policy.dtype == torch.float16, settings.offload != Offload.none
    return Optimizer(policy.trainable, config, steps, settings.max_bad_steps, scaled=scaled, offload=offload)
