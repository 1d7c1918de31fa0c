"""AdamW with clipping and a learning-rate course; a step whose gradient is not finite is skipped, counted, and bounded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybrid_rl.config import OptimizerConfig, Schedule


class TrainingDiverged(RuntimeError):
    """Gradients stayed non-finite for too many steps in a row."""


@dataclass(slots=True)
class StepResult:
    grad_norm: float  # before clipping
    lr: float
    skipped: bool


class Optimizer:
    """Parameters and moments are float32. `total_steps` is the length of the schedule; `bad` counts skipped steps in a row."""

    def __init__(self, parameters: Iterable[nn.Parameter], config: OptimizerConfig, total_steps: int, max_bad_steps: int):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.config, self.total_steps, self.max_bad_steps = config, total_steps, max_bad_steps
        first, second = config.betas
        self.adamw = torch.optim.AdamW(
            self.parameters, lr=config.lr, betas=(first, second), eps=config.eps, weight_decay=config.weight_decay, fused=True
        )
        self.steps = 0
        self.bad = 0

    def learning_rate(self) -> float:
        """Of the step about to be taken: linear warm-up, then constant, or down to final_lr · lr at the last step."""
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
        """Clip, step, clear the gradients. Raises TrainingDiverged after max_bad_steps non-finite gradients in a row."""
        lr = self.learning_rate()
        norm = float(nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm))
        finite = math.isfinite(norm)
        if finite:
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
        self.adamw.zero_grad()
        self.steps += 1
        self.bad = 0 if finite else self.bad + 1
        if self.bad >= self.max_bad_steps:
            raise TrainingDiverged(
                f"the gradient was not finite {self.bad} steps in a row; lower the learning rate ({lr:g}), "
                "or look at the last rollouts (policy.max_bad_steps sets how many are allowed)"
            )
        return StepResult(norm, lr, not finite)

    def tensors(self) -> dict[str, Tensor]:
        """The moments by parameter number, for a checkpoint."""
        state = self.adamw.state_dict()["state"]
        return {f"{index}.{name}": value for index, values in state.items() for name, value in values.items()}

    def restore(self, tensors: dict[str, Tensor], steps: int, bad: int) -> None:
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            index, _, name = key.partition(".")
            state.setdefault(int(index), {})[name] = value
        self.adamw.load_state_dict({"state": state, "param_groups": self.adamw.state_dict()["param_groups"]})
        self.steps, self.bad = steps, bad
