"""Groups that take several steps: the first to end make a step, the others are aborted and go on in a later one.

Which groups end first is decided by an engine's own clock. That of an engine in this process counts decoding steps, so
that a run can be repeated, and resumed, to the bit; one in another process goes by time.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hybrid_rl.engine.base import Completion, Engine, EngineDied, Request, Sampling
from hybrid_rl.rollout.generate import Generator
from hybrid_rl.types import Group, Rollout

PIECE = 8  # decoding steps between two meetings of several ranks


@dataclass(slots=True)
class Partial:
    """The counts of a step whose groups may come from earlier ones; `version` is that of the weights that sampled."""

    version: int
    continued: int = 0  # rollouts that an earlier step had begun
    discarded: int = 0  # rollouts of groups that were too old to go on
    left: int = 0  # groups under way after the step
    tokens: int = 0  # sampled in this step, those of groups under way included


@dataclass(slots=True, eq=False)
class Begun:
    """A group under way, of the task at `place`, and what is sampled of its rollouts, by their index.

    A completion with finish reason "abort" is to be continued. Rollouts get their tokens, and rewards, when all ended.
    """

    place: int
    group: Group
    completions: dict[int, Completion] = field(default_factory=dict)

    def ended(self, index: int) -> bool:
        return index in self.completions and self.completions[index].finish_reason != "abort"

    @property
    def whole(self) -> bool:
        return all(map(self.ended, range(len(self.group.rollouts))))

    @property
    def oldest(self) -> int | None:
        """Return the version that sampled the oldest token, None without one."""
        return min((version for c in self.completions.values() for version, _ in c.versions), default=None)

    @property
    def tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.completions.values())


class Underway:
    """The groups under way, oldest first; every rank holds the same."""

    def __init__(self, generator: Generator):
        self.generator, self.groups = generator, list[Begun]()

    def begin_step(self, max_staleness: int) -> Partial:
        """Discard each group with a token more than `max_staleness` versions behind. Return the counts so far."""
        version = self.generator.engine.version
        stale = [b for b in self.groups if b.oldest is not None and version - b.oldest > max_staleness]
        self.groups = [b for b in self.groups if b not in stale]
        continued = sum(c.finish_reason == "abort" for b in self.groups for c in b.completions.values())
        return Partial(version, continued, sum(len(b.group.rollouts) for b in stale), len(self.groups))

    def close(
        self, wanted: int, sampling: Sampling, counts: Partial, on_completion: Callable[[int], None]
    ) -> list[Begun]:
        """Sample until `wanted` groups have ended, and return these, scored, in the order of their ids. Collective.

        A rank samples a contiguous share of what is open. Ranks meet every PIECE decoding steps to tell each other
        what ended; groups that end between two meetings count in the order of their ids, and one too many is the next
        step's. If the engine of a rank dies, its open requests begin again with what they had before.
        """
        before, closed, ranks = sum(b.tokens for b in self.groups), list[Begun](), self.generator.ranks
        while True:
            # one too many of the step before, or what ended before a death was known
            self._close([b for b in self.groups if b not in closed], closed, wanted)
            if len(closed) == wanted or all(b.whole for b in self.groups):
                break
            if death := self._sample(closed, wanted, sampling, on_completion):
                if self.generator.revive is None:
                    raise death
                self.generator.revive(death)
        counts.tokens += sum(b.tokens for b in self.groups) - before
        self.generator.scorer.finish()
        mine = [(b.group, r) for b in closed for r in b.group.rollouts if self._scores(r)]
        if self.generator.reward_model:
            self.generator._pay(mine, self.generator.reward_model)
        if ranks.world > 1:
            of = {b.group.id: b.group for b in closed}
            for own in ranks.all_gather([rollout for _, rollout in mine]):
                for rollout in own:
                    of[rollout.group_id].rollouts[rollout.index] = rollout
        self.groups = [b for b in self.groups if b not in closed]
        counts.left = len(self.groups)
        return sorted(closed, key=lambda b: b.group.id)

    def _sample(
        self, closed: list[Begun], wanted: int, sampling: Sampling, on_completion: Callable[[int], None]
    ) -> EngineDied | None:
        """Sample what is open until `wanted` groups are closed, then abort the rest. Return the death of an engine."""
        engine, ranks = self.generator.engine, self.generator.ranks
        order = [(b, r) for b in self.groups for r in b.group.rollouts if not b.ended(r.index)]
        mine = [_request(i, *order[i]) for i in ranks.share(len(order), engine.team.world)]
        stream = _pieces(engine, mine, sampling, 1 if ranks.world == 1 else PIECE)
        death, going = None, True
        while going:
            everyone = ranks.all_gather(next(stream, None))
            death = next((found for found in everyone if isinstance(found, EngineDied)), None)
            ended = [c for piece in everyone if isinstance(piece, list) for c in piece]
            if ended:
                on_completion(len(ended))
                self._close(_note(order, ended), closed, wanted)
            going = not death and len(closed) < wanted and any(piece is not None for piece in everyone)
        for rest in ranks.all_gather(_rest(engine, stream)):
            _note(order, rest)
        return death

    def _close(self, groups: Sequence[Begun], closed: list[Begun], wanted: int) -> None:
        """Close those of the groups that have ended, while fewer than `wanted` are closed.

        Their rollouts get their tokens, and are scored while others are sampled.
        """
        for begun in groups:
            if len(closed) < wanted and begun.whole:
                closed.append(begun)
                for rollout in filter(self._scores, begun.group.rollouts):
                    self.generator._take(begun.completions[rollout.index], begun.group, rollout, None)

    def _scores(self, rollout: Rollout) -> bool:
        """Return whether this rank scores the rollout; neighbours are scored by different ranks."""
        return (rollout.group_id + rollout.index) % self.generator.ranks.world == self.generator.ranks.rank

    def state(self) -> list[dict[str, Any]]:
        """Return the groups as JSON holds them; numbers of tokens are base64 of int32 and float32."""
        return [
            {
                "place": begun.place,
                "id": begun.group.id,
                "completions": {str(index): _packed(c) for index, c in begun.completions.items()},
            }
            for begun in self.groups
        ]

    def restore(self, state: Sequence[dict[str, Any]], new_group: Callable[[int, int], Group]) -> None:
        """Go on from a state; `new_group` makes the empty group of a task's place and a group's id."""
        self.groups = []
        for saved in state:
            begun = Begun(saved["place"], new_group(saved["place"], saved["id"]))
            begun.completions = {int(index): _unpacked(c) for index, c in saved["completions"].items()}
            self.groups.append(begun)


def _request(id: int, begun: Begun, rollout: Rollout) -> Request:
    prompt: list[int] = rollout.token_ids.tolist()  # nothing is sampled into the rollout yet
    if so_far := begun.completions.get(rollout.index):
        return Request(id, prompt, rollout.seed, so_far.token_ids, so_far.logprobs, so_far.versions)
    return Request(id, prompt, rollout.seed)


def _pieces(
    engine: Engine, requests: Sequence[Request], sampling: Sampling, tokens: int
) -> Iterator[list[Completion] | EngineDied]:
    """Yield the engine's pieces; if it dies, that is the last item."""
    try:
        yield from engine.generate_in_pieces(requests, sampling, tokens)
    except EngineDied as error:
        yield error


def _rest(engine: Engine, stream: Iterator[list[Completion] | EngineDied]) -> list[Completion]:
    """Stop sampling; return the partial completions, and those that ended before the engine heard of it."""
    try:
        aborted = engine.abort()
    except EngineDied:  # its next call says so again
        return []
    return aborted + [c for piece in stream if isinstance(piece, list) for c in piece]


def _note(order: Sequence[tuple[Begun, Rollout]], completions: Sequence[Completion]) -> list[Begun]:
    """Keep completions, whole or partial, with their groups; return these, in the order of their ids."""
    for completion in completions:
        begun, rollout = order[completion.id]
        if completion.token_ids:
            begun.completions[rollout.index] = completion
    return sorted({order[c.id][0] for c in completions}, key=lambda begun: begun.group.id)


def _packed(c: Completion) -> dict[str, Any]:
    ids, logprobs = np.array(c.token_ids, "<i4").tobytes(), np.array(c.logprobs, "<f4").tobytes()
    return {
        "token_ids": b64encode(ids).decode(),
        "logprobs": b64encode(logprobs).decode(),
        "versions": [list(segment) for segment in c.versions],
        "finish_reason": c.finish_reason,
    }


def _unpacked(saved: dict[str, Any]) -> Completion:
    ids: list[int] = np.frombuffer(b64decode(saved["token_ids"]), "<i4").tolist()
    logprobs: list[float] = np.frombuffer(b64decode(saved["logprobs"]), "<f4").tolist()
    versions = [(version, count) for version, count in saved["versions"]]
    return Completion(0, ids, logprobs, versions, saved["finish_reason"])


# ---- how old the tokens of a batch are ------------------------------------------------------------------------------


def lags(rollout: Rollout, version: int) -> np.ndarray:
    """Return by how many versions each sampled token is behind `version`, [sampled] int64."""
    return np.repeat([version - v for v, _ in rollout.versions], [count for _, count in rollout.versions])


def shares_by_lag(found: np.ndarray) -> dict[str, float]:
    """Return the share of tokens at each lag that there is, from the lags [N] of all tokens."""
    values, counts = np.unique(found, return_counts=True)
    return {str(lag): count / len(found) for lag, count in zip(values.tolist(), counts.tolist(), strict=True)}


def means_by_lag(found: np.ndarray, values: np.ndarray) -> dict[str, float]:
    """Return the mean of the values [N] at each lag that there is."""
    return {str(lag): float(values[found == lag].mean()) for lag in np.unique(found).tolist()}
