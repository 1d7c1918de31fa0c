"""Turn rollouts into the rows of forward passes: padded, packed, or group trees, behind one function.

Whatever the layout, callers see the batch's sampled tokens as one vector [N], in the order of the rollouts given:
`sampled_tokens` builds the recorded facts in that order, and each row says which of the N tokens it predicts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from hybrid_rl.attention.attend import AttentionLayout, Packed, Padded
from hybrid_rl.attention.trees import Trees
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.types import PackedBatch, Rollout

Layout = Literal["padded", "packed", "trees"]
ROW_COST = 1 / 32  # what a row costs beside its tokens, as a share of a full one: trees are cut if that saves more


@dataclass(slots=True)
class SampledTokens:
    """All N sampled tokens of a batch in rollout order: behaviour_logprobs [N] float32, rollout_index [N] int64."""

    behaviour_logprobs: Tensor
    rollout_index: Tensor

    def __len__(self) -> int:
        return len(self.rollout_index)


def sampled_tokens(rollouts: Sequence[Rollout], device: Any = "cpu") -> SampledTokens:
    logprobs = [r.logprobs[r.loss_mask] for r in rollouts]
    index = np.repeat(np.arange(len(rollouts)), [len(own) for own in logprobs])
    return SampledTokens(torch.from_numpy(_joined(logprobs, np.float32)).to(device), torch.from_numpy(index).to(device))


def best_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Return lists of item indices, one per bin of `capacity`: longest first, each into the fullest bin with space.

    Raises ValueError for an item larger than a bin. Ties keep the given order, so that packing is reproducible.
    """
    bins: list[list[int]] = []
    space: list[tuple[int, int]] = []  # what is left in each bin, and its number, ascending
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        if sizes[item] > capacity:
            raise ValueError(f"a sample of {sizes[item]} tokens does not fit a row of {capacity}")
        place = bisect_left(space, (sizes[item], 0))
        free, target = space.pop(place) if place < len(space) else (capacity, len(bins))
        if target == len(bins):
            bins.append([])
        bins[target].append(item)
        insort(space, (free - sizes[item], target))
    return bins


class Rows(Sequence[PackedBatch]):
    """The rows of one rank, each made when it is asked for: those that wait take no memory, and the device no time.

    The last `idle` of them have nothing to predict.
    """

    def __init__(self, make: Callable[[list[_Unit]], PackedBatch], plan: list[list[_Unit]], idle: int):
        self._make, self._plan, self._idle = make, plan, idle

    def __len__(self) -> int:
        return len(self._plan) + self._idle

    @overload
    def __getitem__(self, place: int) -> PackedBatch: ...
    @overload
    def __getitem__(self, place: slice) -> list[PackedBatch]: ...
    def __getitem__(self, place: int | slice) -> PackedBatch | list[PackedBatch]:
        places = range(len(self))[place]
        if isinstance(places, range):
            return [self[i] for i in places]
        return self._make(self._plan[places]) if places < len(self._plan) else _idle_row()


def pack(rollouts: Sequence[Rollout], layout: Layout, row_tokens: int, ranks: Ranks | None = None) -> Rows:
    """Return this rank's rows, of at most `row_tokens` tokens each; all ranks together hold every rollout once.

    Every rank has the same number of rows, since forward and backward are collective: a rank with less to do gets rows
    without sampled tokens, whose gradient is zero. Raises ValueError for a rollout that does not fit into a row.
    """
    ranks = ranks or Ranks()
    sampled = np.array([r.sampled for r in rollouts], np.int64)
    width = max((len(r.token_ids) for r in rollouts), default=0)
    plans = [_plan(rollouts, part, layout, row_tokens, width) for part in share_out(rollouts, layout, ranks.world)]
    trees, pad_to = layout == "trees", width if layout == "padded" else 0
    make = partial(_row, rollouts=rollouts, starts=sampled.cumsum() - sampled, trees=trees, pad_to=pad_to)
    return Rows(make, plans[ranks.rank], max(map(len, plans)) - len(plans[ranks.rank]))


def share_out(rollouts: Sequence[Rollout], layout: Layout, ranks: int) -> list[list[int]]:
    """Return one list of the rollouts' indices per rank, with about equal numbers of tokens.

    Trees: contiguous parts, so that at most ranks − 1 prompts are computed twice. Otherwise the longest first, each to
    the rank with the least so far.
    """
    sizes = [len(r.token_ids) for r in rollouts]
    parts: list[list[int]] = [[] for _ in range(ranks)]
    if layout == "trees":
        before, total = 0, sum(sizes)
        for i, size in enumerate(sizes):
            parts[min(ranks - 1, int((before + size / 2) * ranks / max(1, total)))].append(i)
            before += size
    else:
        load = [0] * ranks
        for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
            least = load.index(min(load))
            parts[least].append(i)
            load[least] += sizes[i]
    return [sorted(part) for part in parts]


def _plan(
    rollouts: Sequence[Rollout], part: list[int], layout: Layout, row_tokens: int, width: int
) -> list[list[_Unit]]:
    """Return the units of each row of one rank."""
    units = _trees(rollouts, part) if layout == "trees" else [_Unit(0, [i]) for i in part]
    if layout == "padded":
        if width > row_tokens:
            raise ValueError(f"a sample of {width} tokens does not fit a row of {row_tokens}")
        per_row = row_tokens // max(1, width)
        return [units[i : i + per_row] for i in range(0, len(units), per_row)]
    whole = [piece for unit in units for piece in _pieces(unit, rollouts, row_tokens)]
    plan = [
        [whole[u] for u in row] for row in best_fit_decreasing([unit.tokens(rollouts) for unit in whole], row_tokens)
    ]
    if layout == "packed":
        return plan

    def cost(plan: list[list[_Unit]]) -> float:
        return len(plan) * ROW_COST * row_tokens + sum(unit.tokens(rollouts) for row in plan for unit in row)

    return min(plan, _cut(units, rollouts, row_tokens), key=cost)


@dataclass(slots=True)
class _Unit:
    """Rollouts that packing keeps together, since they share their first `shared` tokens (0: a single rollout)."""

    shared: int
    members: list[int]

    def tokens(self, rollouts: Sequence[Rollout]) -> int:
        return self.shared + sum(len(rollouts[i].token_ids) - self.shared for i in self.members)


def _trees(rollouts: Sequence[Rollout], part: list[int]) -> list[_Unit]:
    """Join neighbouring rollouts with one prompt in a tree."""
    trees = [list(members) for _, members in groupby(part, key=lambda i: _prompt(rollouts[i]))]
    return [_Unit(rollouts[tree[0]].prompt_length, tree) for tree in trees]


def _pieces(unit: _Unit, rollouts: Sequence[Rollout], row_tokens: int) -> list[_Unit]:
    """Split a tree larger than a row into as few trees as possible; each repeats the prompt."""
    if unit.tokens(rollouts) <= row_tokens:
        return [unit]
    sizes = [len(rollouts[i].token_ids) - unit.shared for i in unit.members]
    if unit.shared + max(sizes) > row_tokens:
        raise ValueError(f"a sample of {unit.shared + max(sizes)} tokens does not fit a row of {row_tokens}")
    pieces = best_fit_decreasing(sizes, row_tokens - unit.shared)
    return [_Unit(unit.shared, [unit.members[i] for i in sorted(piece)]) for piece in pieces]


def _cut(trees: list[_Unit], rollouts: Sequence[Rollout], row_tokens: int) -> list[list[_Unit]]:
    """Fill row after row with trees in their order, their longest branches first; what does not fit begins the next row.

    Rows are as full as branches allow, and nearly every row repeats a prompt.
    """
    rows: list[list[_Unit]] = [[]]
    free = row_tokens
    for tree in trees:
        left = sorted(tree.members, key=lambda i: (-len(rollouts[i].token_ids), i))
        while left:
            chosen, room = list[int](), free - tree.shared
            for i in left:
                size = len(rollouts[i].token_ids) - tree.shared
                if size <= room:
                    chosen.append(i)
                    room -= size
            if chosen:
                rows[-1].append(_Unit(tree.shared, sorted(chosen)))
                free = room
            if left := [i for i in left if i not in set(chosen)]:
                rows.append([])
                free = row_tokens
    return [row for row in rows if row]


def _prompt(rollout: Rollout) -> bytes:
    return rollout.token_ids[: rollout.prompt_length].tobytes()


def _row(
    units: list[_Unit], rollouts: Sequence[Rollout], starts: np.ndarray, trees: bool = False, pad_to: int = 0
) -> PackedBatch:
    """Return the units' tokens end to end; the tokens of rollout i are number starts[i], … of the sampled ones."""
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    predict_at: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    token_index: list[np.ndarray] = []
    length = 0
    for unit in units:
        root = length  # flat position of the unit's first token
        ids.append(rollouts[unit.members[0]].token_ids[: unit.shared])
        positions.append(np.arange(unit.shared))
        length += unit.shared
        for i in unit.members:
            own, sampled = rollouts[i].token_ids, np.flatnonzero(rollouts[i].loss_mask)
            offset = length - unit.shared  # flat position of token t is offset + t, for t past the shared prompt
            ids.append(own[unit.shared :])
            positions.append(np.arange(unit.shared, len(own)))
            length += len(own) - unit.shared
            predict_at.append(np.where(sampled <= unit.shared, root, offset) + sampled - 1)
            targets.append(own[sampled])
            token_index.append(starts[i] + np.arange(len(sampled)))
        if pad_to:  # never attended to (causality) and never predicted
            ids.append(np.full(root + pad_to - length, ids[-1][-1], np.int32))
            positions.append(np.zeros(root + pad_to - length, np.int64))
            length = root + pad_to
    attention: AttentionLayout
    if trees:
        attention = Trees([(u.shared, [len(rollouts[i].token_ids) - u.shared for i in u.members]) for u in units])
    else:
        attention = Padded(pad_to) if pad_to else Packed([u.tokens(rollouts) for u in units])
    ids_, positions_, *predicted = (
        torch.from_numpy(_joined(parts, np.int64)) for parts in (ids, positions, predict_at, targets, token_index)
    )
    return PackedBatch(ids_, positions_, attention, *predicted)


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """Return the arrays end to end; an empty one if there are none."""
    return np.concatenate([np.zeros(0, dtype), *parts])


def _idle_row() -> PackedBatch:
    """Return a row of one token with nothing to predict, for a rank that has nothing to do."""
    nothing = torch.zeros(0, dtype=torch.int64)
    one = torch.zeros(1, dtype=torch.int64)
    return PackedBatch(one, one, Packed([1]), nothing, nothing, nothing)
