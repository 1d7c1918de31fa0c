"""Environments with Gymnasium's interface whose observations are texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydra.utils import get_method

from hybrid_rl.environments.base import Done, Reply
from hybrid_rl.types import Task


class Gymnasium:
    """Play an environment of Gymnasium's interface: reset(seed=…, options=…) → (observation, info), step(action) → five values.

    make: the path of a function that returns one, `gymnasium.make` or your own; arguments: what it is called with. The
    first observation is in the task's messages, so the task holds what leads to it: its columns `seed` (0 without it)
    and `options` are given to reset. The action is the completion, stripped; each step's reward is paid; the end of
    either kind ends the conversation. Observations are shown as texts.
    """

    def __init__(self, make: str, arguments: Mapping[str, Any] | None = None):
        self.environment = get_method(make)(**(arguments or {}))

    def reset(self, task: Task) -> None:
        self.environment.reset(seed=int(task.columns.get("seed", 0)), options=task.columns.get("options"))

    def step(self, completion: str) -> Reply | Done:
        observation, reward, terminated, truncated, _ = self.environment.step(completion.strip())
        return Done(reward) if terminated or truncated else Reply(str(observation), reward)
