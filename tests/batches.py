"""Batches of rewards for the tests of advantages, written out or drawn, and whitening as plain Python has it."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rl.algo.batch import Scored


def scored(
    groups: list[list[float]], lengths: list[int] | None = None, dtype: torch.dtype = torch.float64, **columns: object
) -> Scored:
    """A batch of rewards by group; one token each and all kept, where nothing else is said."""
    outcomes = torch.tensor([r for group in groups for r in group], dtype=dtype)
    lengths = lengths or [1] * len(outcomes)
    kept = torch.tensor(columns.pop("kept", [True] * len(outcomes)), dtype=torch.bool)
    given = {name: torch.tensor(values, dtype=dtype) for name, values in columns.items()}
    zeros = {name: torch.zeros(sum(lengths), dtype=dtype) for name in ("behaviour_logprobs", "old_logprobs")}
    return Scored(outcomes, [len(g) for g in groups], torch.tensor(lengths), kept, **(zeros | given))  # type: ignore[arg-type]


def close(actual: Tensor, expected: list[float], **tolerance: float) -> None:
    assert actual.tolist() == pytest.approx(expected, **(tolerance or {"rel": 1e-10, "abs": 1e-10}))


number = st.integers(-64, 64).map(lambda n: n / 16)  # exact in float, so that a shift or another order adds no rounding
group = st.lists(number, min_size=2, max_size=7)
logprob = st.floats(-4, 0)


@st.composite
def batches(draw, **columns: st.SearchStrategy[float]) -> Scored:
    """A few groups, singletons among them, rollouts of 1 to 6 tokens, penalties, some not kept, and per-token columns."""
    groups = draw(st.lists(st.lists(number, min_size=1, max_size=4), min_size=1, max_size=4))
    rollouts = sum(map(len, groups))
    lengths = draw(st.lists(st.integers(1, 6), min_size=rollouts, max_size=rollouts))
    kept = draw(st.lists(st.booleans(), min_size=rollouts, max_size=rollouts))
    tokens = {
        name: draw(st.lists(strategy, min_size=sum(lengths), max_size=sum(lengths)))
        for name, strategy in ({"penalties": number} | columns).items()
    }
    return scored(groups, lengths, kept=kept, **tokens)


def rollouts(batch: Scored, *names: str) -> list[list[list[float]]]:
    """For each rollout its slice of each column, as lists."""
    ends = [sum(batch.lengths.tolist()[: i + 1]) for i in range(len(batch.lengths))]
    columns = [getattr(batch, name).tolist() for name in names]
    return [[c[end - n : end] for c in columns] for end, n in zip(ends, batch.lengths.tolist(), strict=True)]


def whitened(values: list[float], kept: list[bool]) -> list[float]:
    own = [v for v, keep in zip(values, kept, strict=True) if keep]
    if len(own) < 2 or max(own) == min(own):
        return [0.0] * len(values)
    scale = math.sqrt(stdev(own) ** 2 + 1e-8)
    return [(v - fmean(own)) / scale if keep else 0.0 for v, keep in zip(values, kept, strict=True)]


def spread(batch: Scored, column: list) -> list:
    return [x for x, n in zip(column, batch.lengths.tolist(), strict=True) for _ in range(n)]
