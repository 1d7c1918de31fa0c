"""Environments in a worker process: an object a conversation, which is made again from what was said if it is lost."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from hydra.utils import instantiate

from hybrid_rl.environments.base import Done, Reply, messages_of
from hybrid_rl.rollout.reward_call import (
    BAD_REPLY,
    CHANGED,
    ONE,
    Refused,
    Result,
    Reward,
    RewardFault,
    Score,
    Turn,
    Unusable,
    as_numbers,
    checked,
    event_loop,
    fault_of,
    read_result,
)
from hybrid_rl.sandbox.run import SandboxError
from hybrid_rl.types import Task

MOST = 4096  # conversations that a process holds; those asked for longest ago are made again


@dataclass(frozen=True, slots=True)
class Said:
    """A conversation with the policy: its completions, the environment's messages after each but the last.

    `key` is the same in all its turns. `ended`: the policy cannot answer again, whatever is replied.
    """

    key: int
    completions: tuple[str, ...]
    replies: tuple[tuple[dict[str, str], ...], ...] = ()
    ended: bool = False


@dataclass(slots=True)
class _Live:
    """An environment, what it was told, what it replied, and what it has paid."""

    environment: Any
    told: list[str] = field(default_factory=list)
    reply: tuple[dict[str, str], ...] | None = ()  # to the last completion; None: it is over
    parts: dict[str, float] = field(default_factory=dict)
    measures: dict[str, float] = field(default_factory=dict)
    answer: str | None = None

    def pay(self, reward: object, measures: Mapping[str, float] = MappingProxyType({})) -> None:
        """Add what a turn pays, and its measures."""
        parts, measured, answer = ({}, {}, None) if reward is None else read_result(reward)
        measured |= as_numbers(measures, "measure") if measures else {}
        for into, found in ((self.parts, parts), (self.measures, measured)):
            for name, value in found.items():
                into[name] = into.get(name, 0.0) + value
        self.answer = self.answer if answer is None else answer


class Environments:
    """The conversations of a process with objects of the class that `section` names.

    `reward`, if there is one, scores the last completion of each conversation; its parts are added to what the
    environment pays.
    """

    def __init__(self, section: Mapping[str, Any], reward: Reward | None = None):
        self.make: Callable[[], Any] = instantiate(dict(section), _partial_=True, _convert_="all")
        self.reward = reward
        made = self.make()
        if missing := [name for name in ("reset", "step") if not callable(getattr(made, name, None))]:
            raise TypeError(f"{section['_target_']} has no method {missing[0]}()")
        # whether it gains from more than one conversation at a time
        self.many = any(map(inspect.iscoroutinefunction, (made.reset, made.step))) or bool(reward and reward.many)
        self._live: dict[int, _Live] = {}

    def score(self, conversations: Sequence[Said], tasks: Sequence[Task]) -> list[Result]:
        """Return for each conversation the environment's next turn, its score if it is over, or the fault."""
        return event_loop().run_until_complete(self._all(conversations, tasks))

    async def _all(self, conversations: Sequence[Said], tasks: Sequence[Task]) -> list[Result]:
        results: list[Result] = list(await asyncio.gather(*map(self._one, conversations, tasks)))
        over = [i for i, result in enumerate(results) if isinstance(result, Score)]
        if over and self.reward:
            last = [conversations[i].completions[-1] for i in over]
            scores = await self.reward.score_all(last, [tasks[i] for i in over])
            for i, of_reward in zip(over, scores, strict=True):
                own = results[i]
                results[i] = _sum(own, of_reward) if isinstance(own, Score) else own
        return results

    async def _one(self, said: Said, task: Task) -> Result:
        live = self._live.pop(said.key, None)
        if live is not None and tuple(live.told) != said.completions[: len(live.told)]:
            live = None
        try:
            if live is None:
                live = _Live(self.make())
                await _result(live.environment.reset(task))
            while len(live.told) < len(said.completions) and live.reply is not None:
                await self._step(live, said)
        except Refused as refused:
            return refused.fault
        except SandboxError as error:
            return Unusable(str(error))
        except BaseException as error:  # an environment may raise anything
            return fault_of(error)
        if live.reply is not None and not said.ended:
            self._live[said.key] = live
            if len(self._live) > MOST:
                del self._live[next(iter(self._live))]
            return Turn(live.reply)
        parts = live.parts or ({} if self.reward else {ONE: 0.0})
        return checked(Score(sum(parts.values()), parts, live.measures, live.answer, live.reply is not None))

    async def _step(self, live: _Live, said: Said) -> None:
        """Tell the environment the next completion. Raises Refused for a reply that is none, or another than before."""
        turn = len(live.told)
        found = await _result(live.environment.step(said.completions[turn]))
        live.told.append(said.completions[turn])
        if isinstance(found, Done):
            live.reply = None
            live.pay(found.reward, found.measures)
        else:
            reply = found if isinstance(found, Reply) else Reply(found)  # type: ignore[arg-type]
            try:
                live.reply = messages_of(reply.messages)
            except TypeError as error:
                raise Refused(BAD_REPLY, str(error)) from error
            live.pay(reply.reward)
        if turn < len(said.replies) and live.reply != said.replies[turn]:
            raise Refused(
                CHANGED,
                f"the environment's process was lost, and a new one replied otherwise to the same completions (turn {turn + 1}); "
                "let replies depend on the task and on what was said alone",
            )


async def _result(value: Any) -> object:
    return await value if inspect.isawaitable(value) else value


def _sum(own: Score, of_reward: Result) -> Result:
    """Return what the environment and the reward pay together."""
    if not isinstance(of_reward, Score):
        return of_reward
    if twice := sorted(own.parts.keys() & of_reward.parts.keys()):
        return RewardFault(
            BAD_REPLY, f"the environment and the reward both pay a part named {twice[0]!r}; rename one of them"
        )
    parts, measures = {**own.parts, **of_reward.parts}, {**own.measures, **of_reward.measures}
    answer = own.extracted if of_reward.extracted is None else of_reward.extracted
    return checked(Score(sum(parts.values()), parts, measures, answer, own.cut))
