"""Load a reward, one function or named parts with weights, call it, and check what it returns.

A fault is returned and not raised: not every exception survives the way to another process.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from hydra.utils import instantiate

from hybrid_rl.sandbox.run import SandboxError
from hybrid_rl.types import Task

# kinds of faults beside the name of a raised exception
TIMEOUT, DIED, NOT_FINITE, TOO_LARGE = "timeout", "died", "not finite", "too large"
NOT_A_NUMBER, NO_PARTS, BAD_NAME, BAD_CALL = "not a number", "no parts", "bad name of a part", "wrong arguments"
BAD_BATCH = "bad batch"
BAD_REPLY, CHANGED = "bad reply", "not repeatable"  # of an environment
CONTRACT = (NOT_A_NUMBER, NO_PARTS, BAD_NAME, BAD_CALL, BAD_BATCH, BAD_REPLY)  # no input excuses these
LARGEST = 1e15  # of a reward: float32 can still add up its squares
# keys of a named part that are not arguments of its function
WEIGHT, SOURCES = "weight", "sources"


@dataclass(frozen=True, slots=True)
class RewardFault:
    """What a reward did instead of giving a number: faults are counted by `kind`; `text` is for a person."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Unusable:
    """Why no reward can be had on this machine, whatever the completion."""

    text: str


@dataclass(frozen=True, slots=True)
class Score:
    """The reward, the named parts that it is the sum of, and measures, which are logged and not paid."""

    reward: float
    parts: dict[str, float]
    measures: dict[str, float] = field(default_factory=dict)
    extracted: str | None = None  # the answer that it found in the completion
    cut: bool = False  # whether an environment would have gone on


@dataclass(frozen=True, slots=True)
class Turn:
    """What an environment replied to a completion: chat messages, after which the policy answers again."""

    messages: tuple[dict[str, str], ...]


Result = Score | RewardFault | Unusable | Turn


class Refused(Exception):
    """A result that is no reward, and no reply of an environment."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.fault = RewardFault(kind, text)


class Reward:
    """The functions of a `reward` section, loaded: one with `_target_`, or several by name, each with a weight.

    A named part may have `weight` (1 by default; 0: logged as a measure and not paid) and `sources`, the sources of
    tasks that it applies to (all by default).
    """

    def __init__(self, section: Mapping[str, Any]):
        nodes = {"": section} if "_target_" in section else section
        self.parts = {name: _Part(node) for name, node in nodes.items()}
        # whether it gains from more than one completion at a time
        self.many = any(part.many for part in self.parts.values())

    def score(self, completions: Sequence[str], tasks: Sequence[Task]) -> list[Result]:
        """Return for each completion its score, or what the reward did instead: any exception, any kind of result."""
        return event_loop().run_until_complete(self.score_all(completions, tasks))

    async def score_all(self, completions: Sequence[str], tasks: Sequence[Task]) -> list[Result]:
        """Return what `score` returns; for a caller in the event loop."""
        rows: list[dict[str, object]] = [{} for _ in tasks]
        for name, part in self.parts.items():
            own = [i for i, task in enumerate(tasks) if part.sources is None or task.source in part.sources]
            if own:
                found = await part.call([completions[i] for i in own], [tasks[i] for i in own])
                for i, value in zip(own, found, strict=True):
                    rows[i][name] = value
        return [self._sum(row, task) for row, task in zip(rows, tasks, strict=True)]

    def _sum(self, row: Mapping[str, object], task: Task) -> Result:
        parts: dict[str, float] = {}
        measures: dict[str, float] = {}
        answer: str | None = None
        for name, value in row.items():
            part, said = self.parts[name], f"part {name!r}: " if name else ""
            if isinstance(value, Unusable):
                return value
            if isinstance(value, RewardFault):
                return RewardFault(value.kind, f"{said}{value.text}")
            if value is None and name:  # it has nothing to say about this completion
                continue
            try:
                paid, logged, extracted = read_result(value)
            except Refused as refused:
                return RewardFault(refused.fault.kind, f"{said}{refused.fault.text}")
            except BaseException as error:  # of a number of the reward's own
                return fault_of(error, said)
            answer = extracted if answer is None else answer
            paid, logged = _named(name, paid), _named(name, logged)
            if name and part.weight == 0:
                measures |= paid
            else:
                parts |= {key: part.weight * number for key, number in paid.items()}
            measures |= logged
        if not parts:
            return RewardFault(NO_PARTS, f"no part of the reward pays for tasks of source {task.source!r}")
        return checked(Score(sum(parts.values()), parts, measures, answer))


class _Part:
    """One function, or an object of a class, with its weight and its sources. Raises what loading it raises."""

    def __init__(self, node: Mapping[str, Any]):
        given = {key: value for key, value in node.items() if key not in (WEIGHT, SOURCES)}
        self.function: Callable[..., Any] = instantiate(given, _partial_=True, _convert_="all")
        if inspect.isclass(getattr(self.function, "func", None)):
            self.function = self.function()
        self.weight, sources = float(node.get(WEIGHT, 1.0)), node.get(SOURCES)
        self.sources = None if sources is None else frozenset([sources] if isinstance(sources, str) else sources)
        names = _first_names(self.function)
        self.batched = names == ["completions", "tasks"]
        if "completions" in names and not self.batched:
            raise TypeError(
                f"{given['_target_']} takes completions by name, as TRL's rewards do; "
                f"write {{_target_: hybrid_rl.rewards.Trl, function: {given['_target_']}}}"
            )
        self.many = self.batched or _is_async(self.function)

    async def call(self, completions: Sequence[str], tasks: Sequence[Task]) -> list[object]:
        """Return what the function returns for each completion, a fault for an exception."""
        if not self.batched:
            return list(await asyncio.gather(*map(self._one, completions, tasks)))
        found = await self._tried(list(completions), list(tasks))
        if isinstance(found, Unusable):
            return [found] * len(tasks)
        if not isinstance(found, RewardFault):
            try:
                values: list[object] = list(found)  # type: ignore[call-overload]
            except TypeError:
                values = []
            if len(values) == len(tasks):
                return values
            size = len(values) if values else f"{type(found).__name__}, not a list"
            found = RewardFault(
                BAD_BATCH, f"the reward returned {size} for {len(tasks)} completions; return one number each"
            )
        if len(tasks) == 1:
            return [found]
        return [
            (await self.call([c], [t]))[0] for c, t in zip(completions, tasks, strict=True)
        ]  # only one may be at fault

    async def _one(self, completion: str, task: Task) -> object:
        return await self._tried(completion, task)

    async def _tried(self, *arguments: object) -> object:
        try:
            result = self.function(*arguments)
            return await result if inspect.isawaitable(result) else result
        except SandboxError as error:
            return Unusable(str(error))
        except BaseException as error:
            if isinstance(error, TypeError) and not _takes(self.function, *arguments):
                names = "(completions, tasks)" if self.batched else "(completion, task)"
                return RewardFault(BAD_CALL, f"the reward cannot be called with {names}: {describe(error)}")
            return fault_of(error)


def _first_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of the function's first two arguments: (completions, tasks) are lists."""
    try:
        return list(inspect.signature(function).parameters)[:2]
    except (TypeError, ValueError):  # it does not tell
        return []


def _is_async(function: Callable[..., Any]) -> bool:
    inner = getattr(function, "func", function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def _takes(function: Callable[..., Any], *arguments: object) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # it does not tell
        pass
    return True


_kept: list[asyncio.AbstractEventLoop] = []


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the one event loop of all calls, so that a client that an async function keeps stays usable."""
    if not _kept:
        _kept.append(asyncio.new_event_loop())
        asyncio.set_event_loop(_kept[0])
    return _kept[0]


# ---- what a function returned ----------------------------------------------------------------------------------------

ONE = "reward"  # the name of the part that a bare number is
ANSWER = "answer"  # the measure that may be a text (or None): the answer that the reward found


def read_result(result: object) -> tuple[dict[str, float], dict[str, float], str | None]:
    """Return (parts, measures, answer) of a number, {part: number}, or a pair of either with a mapping of measures."""
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        return as_numbers(result, "part"), {}, None
    measures = dict(result[1])
    answer = measures.pop(ANSWER) if isinstance(measures.get(ANSWER, 0), str | None) else None
    return as_numbers(result[0], "part"), as_numbers(measures, "measure") if measures else {}, answer


def as_numbers(result: object, what: str) -> dict[str, float]:
    named: dict[Any, Any] = dict(result) if isinstance(result, Mapping) else {ONE: result}
    if not named:
        raise Refused(NO_PARTS, "the reward is {}, which has no part; return a number, or {part: number}")
    numbers: dict[str, float] = {}
    for name, value in named.items():
        if not isinstance(name, str) or not name or name != printable(name, 100):
            raise Refused(
                BAD_NAME, f"the reward has a {what} named {shown(name)}; a name must be a short, printable text"
            )
        if getattr(value, "ndim", None) == 0:  # a scalar of numpy or torch
            value = value.item()
        if not isinstance(value, Real):
            raise Refused(NOT_A_NUMBER, f"the reward's {what} {name!r} is {shown(value)}, not a number")
        numbers[name] = float(value)
    return numbers


def _named(part: str, numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers under the name of the part: a bare number as `part`, others as `part.name`."""
    if not part:
        return dict(numbers)
    return {part if name == ONE else f"{part}.{name}": value for name, value in numbers.items()}


def checked(score: Score) -> Score | RewardFault:
    total, parts, measures = score.reward, score.parts, score.measures
    if not all(map(math.isfinite, (total, *parts.values()))):
        return RewardFault(NOT_FINITE, f"reward {total} with parts {shown(parts)} is not finite")
    if not all(map(math.isfinite, measures.values())):
        return RewardFault(NOT_FINITE, f"the measures {shown(measures)} are not finite")
    if max(map(abs, (total, *parts.values(), *measures.values()))) > LARGEST:
        measured = f" and measures {shown(measures)}" if measures else ""
        return RewardFault(
            TOO_LARGE,
            f"reward {total:g} with parts {shown(parts)}{measured} is beyond ±{LARGEST:g}, "
            "which float32 cannot compute with",
        )
    return score


def printable(text: str, most: int) -> str:
    """Return one line of at most `most` characters, without control characters and halves of surrogate pairs."""
    line = "".join(c if c.isprintable() else " " for c in text[:most])
    return line if len(text) <= most else f"{line}…"


def shown(value: object) -> str:
    """Describe a value that may be of any size, or have no repr, in one line."""
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return printable(text, 100)


def fault_of(error: BaseException, said: str = "") -> RewardFault:
    """Return an exception of the reward's own as a fault of its name."""
    return RewardFault(printable(type(error).__name__, 100), f"{said}{describe(error)}")


def describe(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:  # of an exception of the reward's own
        text = "(without a text)"
    return printable(f"{type(error).__name__}: {text}", 500)
