"""Rewards in worker processes, so that scoring overlaps generation and no reward can hang or crash the run.

A reward is a function (completion: str, task: Task) → float, or → {part: float} whose sum is the reward. Whatever it does
instead (raise, hang, return something else, kill its process) becomes an error on the rollout: counted by its kind, never invented.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from numbers import Real
from typing import Any

from hydra.utils import instantiate
from pebble import CONSTS, ProcessExpired, ProcessFuture, ProcessPool

from hybrid_rl.processes import hangs
from hybrid_rl.processes.children import Context
from hybrid_rl.types import Rollout, Task

CONSTS.term_timeout = 0.2  # seconds before pebble kills a worker, which takes no notice of SIGTERM
# kinds of faults beside a raised exception's name
TIMEOUT, DIED, NOT_FINITE, NOT_A_NUMBER = "timeout", "died", "not finite", "not a number"
POOLS = 3  # new ones that a step may need before the machine is called broken


class RewardError(RuntimeError):
    """No reward could be had, or too few."""


@dataclass(frozen=True, slots=True)
class RewardFault:
    """What a reward did instead of giving a number: `kind` is what faults are counted by, `text` what a person reads."""

    kind: str
    text: str


@dataclass(slots=True)
class _Asked:
    rollout: Rollout
    task: Task
    future: ProcessFuture


class Scorer:
    """`workers` processes that each loaded the reward once. One reward may take `timeout` seconds, then its worker is replaced."""

    def __init__(self, reward: Mapping[str, Any], workers: int, timeout: float, start_timeout: float = 60.0):
        self.reward, self.workers, self.timeout, self.start_timeout = dict(reward), workers, timeout, start_timeout
        self._pending: list[_Asked] = []
        self._renewals = 0
        self._pool = self._new_pool()
        self._ready = self._pool.schedule(_loaded)  # starts the workers now, while the model still loads

    def check(self) -> None:
        """Wait until a worker has loaded the reward. Raises RewardError with the reason where it cannot."""
        try:
            self._ready.result(timeout=self.start_timeout)
        except Exception as error:  # whatever the reward's module does when imported
            raise RewardError(f"the reward cannot be loaded: {_describe(error)}") from error

    def submit(self, rollout: Rollout, task: Task) -> None:
        self._pending.append(_Asked(rollout, task, self._schedule(rollout, task)))

    def finish(self) -> int:
        """Wait for everything submitted, and record each reward, or its error, on its rollout; returns the number of errors."""
        errors, left = 0, len(self._pending)
        for asked in self._pending:
            result = self._result(asked, left)
            if isinstance(result, RewardFault):
                asked.rollout.error, asked.rollout.fault = result.text, result.kind
                errors += 1
            else:
                asked.rollout.score(*result)
            hangs.progress()
        self._pending.clear()
        self._renewals = 0
        return errors

    def _result(self, asked: _Asked, left: int) -> tuple[float, dict[str, float]] | RewardFault:
        """What the worker gave; what the pool itself reports, since the worker can not, becomes a fault too."""
        limit = time.monotonic() + (self.timeout + self.start_timeout) * (1 + left)
        while True:
            if wait([asked.future], timeout=1.0).done:
                error = asked.future.exception()
                if error is None:
                    return asked.future.result()
                if isinstance(error, ProcessExpired):
                    return RewardFault(DIED, f"its process died (exit code {error.exitcode})")
                if isinstance(error, TimeoutError):
                    break
                if not isinstance(error, BrokenProcessPool):
                    raise error
                self._renew()
            elif not self._pool.active:
                self._renew()
            elif time.monotonic() > limit:
                break
        return RewardFault(TIMEOUT, f"timed out after {self.timeout:g} s")

    def _new_pool(self) -> ProcessPool:
        context = Context()
        return ProcessPool(max_workers=self.workers, initializer=_load, initargs=(self.reward,), context=context)

    def _schedule(self, rollout: Rollout, task: Task) -> ProcessFuture:
        arguments = (rollout.completion, task)
        try:
            return self._pool.schedule(_score, args=arguments, timeout=self.timeout)
        except RuntimeError:  # the pool is broken
            self._renew()
            return self._pool.schedule(_score, args=arguments, timeout=self.timeout)

    def _renew(self) -> None:
        """A pool breaks where the system kills a worker that has nothing to do. A new one is asked for all that is still owed."""
        self._renewals += 1
        if self._renewals > POOLS:
            raise RewardError(f"processes of the reward were killed {self._renewals} times in one step while they had nothing to do")
        self.close()
        self._pool = self._new_pool()
        for asked in self._pending:
            if not asked.future.done() or isinstance(asked.future.exception(), BrokenProcessPool):
                asked.future = self._schedule(asked.rollout, asked.task)

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


def _score(completion: str, task: Task) -> tuple[float, dict[str, float]] | RewardFault:
    """In the worker: the reward's total and its named parts, or what it did instead.

    A fault is returned and not raised: not every exception survives the way to another process.
    """
    try:
        _loaded()
        result = _reward(completion, task)  # type: ignore[operator]
        named = dict(result) if isinstance(result, Mapping) else {"reward": result}
        for name, value in named.items():
            if not isinstance(value, Real):
                return RewardFault(NOT_A_NUMBER, f"the reward's part {name!r} is {_shown(value)}, not a number")
        parts = {str(name): float(value) for name, value in named.items()}
        total = sum(parts.values())
    except (Exception, SystemExit) as error:  # the reward's own failure, of any kind
        return RewardFault(type(error).__name__, _describe(error))
    if not math.isfinite(total) or not all(map(math.isfinite, parts.values())):
        return RewardFault(NOT_FINITE, f"reward {total} with parts {parts} is not finite")
    return total, parts


def _shown(value: object) -> str:
    """A value that may be of any size, or not even have a repr."""
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:100]}…"


def _describe(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # of an exception of the reward's own
        text = "(without a text)"
    return f"{type(error).__name__}: {text}"
