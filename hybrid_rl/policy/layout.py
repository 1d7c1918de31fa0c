"""Turn rollouts into the rows of forward passes: padded, packed, or group trees, behind one function.

Whatever the layout, callers see the batch's sampled tokens as one vector [N], in the order of the rollouts given:
`sampled_tokens` builds the recorded facts in that order, and each row says which of the N tokens it predicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor

from hybrid_rl.attention.attend import AttentionLayout, Packed, Padded
from hybrid_rl.attention.trees import Trees
from hybrid_rl.processes.ranks import Ranks
from hybrid_rl.types import PackedBatch, Rollout

Layout = Literal["padded", "packed", "trees"]


@dataclass(slots=True)
class SampledTokens:
    """All N sampled tokens of a batch in rollout order: behaviour_logprobs [N] float32, rollout_index [N] int64."""

    behaviour_logprobs: Tensor
    rollout_index: Tensor

    def __len__(self) -> int:
        return len(self.rollout_index)


def sampled_tokens(rollouts: Sequence[Rollout], device: Any = "cpu") -> SampledTokens:
    logprobs = [lp for r in rollouts for lp, m in zip(r.logprobs, r.loss_mask, strict=True) if m]
    index = [i for i, r in enumerate(rollouts) for m in r.loss_mask if m]
    return SampledTokens(
        torch.tensor(logprobs, dtype=torch.float32, device=device),
        torch.tensor(index, dtype=torch.int64, device=device),
    )


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Return lists of item indices, one per bin of `capacity`: longest first, each into the first bin with space.

    Raises ValueError for an item larger than a bin. Ties keep the given order, so that packing is reproducible.
    """
    bins: list[list[int]] = []
    space: list[int] = []  # left in each bin
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        if sizes[item] > capacity:
            raise ValueError(f"a sample of {sizes[item]} tokens does not fit a row of {capacity}")
        target = next((b for b, free in enumerate(space) if free >= sizes[item]), None)
        if target is None:
            bins.append([])
            space.append(capacity)
            target = len(bins) - 1
        bins[target].append(item)
        space[target] -= sizes[item]
    return bins


def pack(rollouts: Sequence[Rollout], layout: Layout, row_tokens: int, ranks: Ranks | None = None) -> list[PackedBatch]:
    """Return this rank's rows, of at most `row_tokens` tokens each; all ranks together hold every rollout once.

    Every rank has the same number of rows, since forward and backward are collective: a rank with less to do gets rows
    without sampled tokens, whose gradient is zero. Raises ValueError for a rollout that does not fit into a row.
    """
    ranks = ranks or Ranks()
    starts = [0]
    for r in rollouts:
        starts.append(starts[-1] + r.sampled)
    width = max((len(r.token_ids) for r in rollouts), default=0)
    plans = [_plan(rollouts, part, layout, row_tokens, width) for part in share_out(rollouts, layout, ranks.world)]
    trees, pad_to = layout == "trees", width if layout == "padded" else 0
    rows = [_row(row, rollouts, starts, trees, pad_to) for row in plans[ranks.rank]]
    return rows + [_idle_row()] * (max(map(len, plans)) - len(rows))


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
    units = _trees(rollouts, part, row_tokens) if layout == "trees" else [_Unit(0, [i]) for i in part]
    if layout == "padded":
        if width > row_tokens:
            raise ValueError(f"a sample of {width} tokens does not fit a row of {row_tokens}")
        per_row = row_tokens // max(1, width)
        return [units[i : i + per_row] for i in range(0, len(units), per_row)]
    return [
        [units[u] for u in row] for row in first_fit_decreasing([unit.tokens(rollouts) for unit in units], row_tokens)
    ]


@dataclass(slots=True)
class _Unit:
    """Rollouts that packing keeps together, since they share their first `shared` tokens (0: a single rollout)."""

    shared: int
    members: list[int]

    def tokens(self, rollouts: Sequence[Rollout]) -> int:
        return self.shared + sum(len(rollouts[i].token_ids) - self.shared for i in self.members)


def _trees(rollouts: Sequence[Rollout], part: list[int], row_tokens: int) -> list[_Unit]:
    """Join neighbouring rollouts with one prompt in a tree; one larger than a row is split, and its prompt repeated."""
    units: list[_Unit] = []
    for prompt, members in groupby(part, key=lambda i: rollouts[i].token_ids[: rollouts[i].prompt_length]):
        left = -1  # tokens
        for i in members:
            size = len(rollouts[i].token_ids) - len(prompt)
            if size > left:
                units.append(_Unit(len(prompt), []))
                left = row_tokens - len(prompt)
            units[-1].members.append(i)
            left -= size
    return units


def _row(
    units: list[_Unit], rollouts: Sequence[Rollout], starts: list[int], trees: bool = False, pad_to: int = 0
) -> PackedBatch:
    ids: list[int] = []
    positions: list[int] = []
    predict_at: list[int] = []
    targets: list[int] = []
    token_index: list[int] = []
    for unit in units:
        root = len(ids)  # flat position of the unit's first token
        ids += rollouts[unit.members[0]].token_ids[: unit.shared]
        positions += range(unit.shared)
        for i in unit.members:
            r = rollouts[i]
            offset = len(ids) - unit.shared  # flat position of token t is offset + t, for t past the shared prompt
            ids += r.token_ids[unit.shared :]
            positions += range(unit.shared, len(r.token_ids))
            sampled = [t for t, m in enumerate(r.loss_mask) if m]
            predict_at += [root + t - 1 if t <= unit.shared else offset + t - 1 for t in sampled]
            targets += [r.token_ids[t] for t in sampled]
            token_index += range(starts[i], starts[i] + len(sampled))
        if pad_to:
            padding = root + pad_to - len(ids)
            ids += [ids[-1]] * padding  # never attended to (causality) and never predicted
            positions += [0] * padding
    attention: AttentionLayout
    if trees:
        attention = Trees([(u.shared, [len(rollouts[i].token_ids) - u.shared for i in u.members]) for u in units])
    else:
        attention = Padded(pad_to) if pad_to else Packed([u.tokens(rollouts) for u in units])
    as_tensor = lambda values: torch.tensor(values, dtype=torch.int64)  # noqa: E731
    return PackedBatch(
        as_tensor(ids),
        as_tensor(positions),
        attention,
        as_tensor(predict_at),
        as_tensor(targets),
        as_tensor(token_index),
    )


def _idle_row() -> PackedBatch:
    """Return a row of one token with nothing to predict, for a rank that has nothing to do."""
    nothing = torch.zeros(0, dtype=torch.int64)
    one = torch.zeros(1, dtype=torch.int64)
    return PackedBatch(one, one, Packed([1]), nothing, nothing, nothing)
