"""A worker process of the rewards: load the reward once, then score one completion after another.

A fault is returned and not raised: not every exception survives the way to another process.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from hybrid_rl.sandbox.run import SandboxError
from hybrid_rl.types import Task

# kinds of faults beside the name of a raised exception
TIMEOUT, DIED, NOT_FINITE, TOO_LARGE = "timeout", "died", "not finite", "too large"
NOT_A_NUMBER, NO_PARTS, BAD_NAME, BAD_CALL = "not a number", "no parts", "bad name of a part", "wrong arguments"
CONTRACT = (NOT_A_NUMBER, NO_PARTS, BAD_NAME, BAD_CALL)  # no input excuses these
LARGEST = 1e15  # of a reward: float32 can still add up its squares


@dataclass(frozen=True, slots=True)
class RewardFault:
    """What a reward did instead of giving a number: `kind` is what faults are counted by, `text` what a person reads."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Unusable:
    """Why no reward can be had on this machine, whatever the completion."""

    text: str


Score = tuple[float, dict[str, float]]  # the reward, and the named parts it is the sum of


def work(pipe: Connection, reward: dict[str, Any], output: Connection) -> None:
    """The process's life: send "" or why the reward cannot be loaded, then answer each (completion, task)."""
    os.setpgrp()  # what the reward starts ends with it, see Worker.kill
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(
            number, signal.SIG_IGN
        )  # sent to a whole process group they are meant for the run, which ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    try:
        function = instantiate(reward, _partial_=True)
    except BaseException as error:  # a module may raise anything
        cause = error.__cause__ if isinstance(error, InstantiationException) else None
        return pipe.send(describe(cause or error))
    pipe.send("")
    own = os.getpid()
    while True:
        try:
            completion, task = pipe.recv()
        except EOFError:
            return
        result = score(function, completion, task)
        if os.getpid() != own:  # the reward forked, and its child came back too
            os._exit(0)
        pipe.send(result)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def score(function: Callable[[str, Task], Any], completion: str, task: Task) -> Score | RewardFault | Unusable:
    """The reward's total and its named parts, or what it did instead: any exception, any kind of result."""
    try:
        result = function(completion, task)
        if inspect.isawaitable(result):
            result = _loop().run_until_complete(result)
        return _checked(result)
    except SandboxError as error:
        return Unusable(str(error))
    except BaseException as error:
        if isinstance(error, TypeError) and not _takes(function, completion, task):
            return RewardFault(BAD_CALL, f"the reward cannot be called with (completion, task): {describe(error)}")
        return RewardFault(printable(type(error).__name__, 100), describe(error))


def _takes(function: Callable[..., Any], *arguments: object) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # it does not tell
        pass
    return True


_kept: list[asyncio.AbstractEventLoop] = []


def _loop() -> asyncio.AbstractEventLoop:
    """One for all calls, so that a client that an async reward keeps stays usable."""
    if not _kept:
        _kept.append(asyncio.new_event_loop())
        asyncio.set_event_loop(_kept[0])
    return _kept[0]


def _checked(result: object) -> Score | RewardFault:
    named: dict[Any, Any] = dict(result) if isinstance(result, Mapping) else {"reward": result}
    if not named:
        return RewardFault(NO_PARTS, "the reward is {}, which has no part; return a number, or {part: number}")
    parts: dict[str, float] = {}
    for name, value in named.items():
        if not isinstance(name, str) or not name or name != printable(name, 100):
            return RewardFault(
                BAD_NAME, f"the reward has a part named {_shown(name)}; a name must be a short, printable text"
            )
        if getattr(value, "ndim", None) == 0:  # a scalar of numpy or torch
            value = value.item()
        if not isinstance(value, Real):
            return RewardFault(NOT_A_NUMBER, f"the reward's part {name!r} is {_shown(value)}, not a number")
        parts[name] = float(value)
    total = sum(parts.values())
    if not all(map(math.isfinite, (total, *parts.values()))):
        return RewardFault(NOT_FINITE, f"reward {total} with parts {_shown(parts)} is not finite")
    if max(map(abs, (total, *parts.values()))) > LARGEST:
        return RewardFault(
            TOO_LARGE,
            f"reward {total:g} with parts {_shown(parts)} is beyond ±{LARGEST:g}, which float32 cannot compute with",
        )
    return total, parts


def printable(text: str, most: int) -> str:
    """One line of at most `most` characters, without control characters and halves of surrogate pairs."""
    line = "".join(c if c.isprintable() else " " for c in text[:most])
    return line if len(text) <= most else f"{line}…"


def _shown(value: object) -> str:
    """A value that may be of any size, or not even have a repr."""
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return printable(text, 100)


def describe(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:  # of an exception of the reward's own
        text = "(without a text)"
    return printable(f"{type(error).__name__}: {text}", 500)
