"""Rewards in worker processes, so that scoring overlaps generation and no reward can hang or crash the run.

A reward is a function (completion: str, task: Task) → float, or → {part: float} whose sum is the reward. Whatever it does
instead (raise, hang, return something else, kill its process) becomes an error on the rollout: counted, never invented.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from numbers import Real
from typing import Any

from hydra.utils import instantiate
from pebble import CONSTS, ProcessExpired, ProcessFuture, ProcessPool

from hybrid_rl.types import Rollout, Task

CONSTS.term_timeout = 0.2  # seconds before pebble kills a worker, which takes no notice of SIGTERM


class RewardError(RuntimeError):
    """No reward could be had at all."""


class Scorer:
    """`workers` processes that each loaded the reward once. One reward may take `timeout` seconds, then its worker is replaced."""

    def __init__(self, reward: Mapping[str, Any], workers: int, timeout: float, start_timeout: float = 60.0):
        self.timeout, self.start_timeout = timeout, start_timeout
        self._pending: list[tuple[Rollout, ProcessFuture]] = []
        self._pool = ProcessPool(
            max_workers=workers, initializer=_load, initargs=(dict(reward),), context=multiprocessing.get_context("spawn")
        )
        self._ready = self._pool.schedule(_loaded)  # starts the workers now, while the model still loads

    def check(self) -> None:
        """Wait until a worker has loaded the reward. Raises RewardError with the reason where it cannot."""
        try:
            self._ready.result(timeout=self.start_timeout)
        except Exception as error:  # whatever the reward's module does when imported
            raise RewardError(f"the reward cannot be loaded: {_describe(error)}") from error

    def submit(self, rollout: Rollout, task: Task) -> None:
        self._pending.append((rollout, self._pool.schedule(_score, args=(rollout.completion, task), timeout=self.timeout)))

    def finish(self) -> int:
        """Wait for everything submitted, and record each reward, or its error, on its rollout; returns the number of errors."""
        errors = 0
        for rollout, future in self._pending:
            try:
                rollout.score(*future.result(timeout=(self.timeout + self.start_timeout) * (1 + len(self._pending))))
            except Exception as error:  # the reward's own failure, of any kind
                rollout.error = _describe(error, self.timeout)
                errors += 1
        self._pending.clear()
        return errors

    def close(self) -> None:
        self._pool.stop()
        self._pool.join()  # bounded: what does not end by itself is killed


_reward: Callable[[str, Task], Any] | str = "the reward was not loaded"


def _load(config: dict[str, Any]) -> None:
    global _reward
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # to a whole process group it is meant for the run, which ends its workers when it ends
    try:
        _reward = instantiate(config, _partial_=True)
    except Exception as error:  # an initializer must not raise: the pool would start worker after worker
        _reward = _describe(error)


def _loaded() -> None:
    if isinstance(_reward, str):
        raise RewardError(_reward)


def _score(completion: str, task: Task) -> tuple[float, dict[str, float]]:
    """In the worker: the reward's total and its named parts. Raises TypeError for anything but numbers."""
    _loaded()
    result = _reward(completion, task)  # type: ignore[operator]
    parts = dict(result) if isinstance(result, Mapping) else {"reward": result}
    for name, value in parts.items():
        if not isinstance(value, Real):
            raise TypeError(f"the reward's part {name!r} is {value!r}, not a number")
    parts = {str(name): float(value) for name, value in parts.items()}
    return sum(parts.values()), parts


def _describe(error: BaseException, timeout: float | None = None) -> str:
    if isinstance(error, FutureTimeout | TimeoutError):
        return f"timed out after {timeout:g} s" if timeout else "timed out"
    if isinstance(error, ProcessExpired):
        return f"its process died (exit code {error.exitcode})"
    return f"{type(error).__name__}: {error}"
