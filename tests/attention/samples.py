"""Rows of attention, and what a layer may ask of it, against sums over tokens in float64."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rl.attention.attend import LayerAttention
from tests.device import DEVICE

HEADS, KV_HEADS, DIM = 4, 2, 8


def by_hand(query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
    """One sample, token by token: query [H, T, D], key and value [K, T, D] → [T, H, D]."""
    rows = []
    for t in range(query.shape[1]):
        first = 0 if how.window is None else max(0, t - how.window + 1)
        heads = []
        for h in range(HEADS):
            k, v = (x[h * KV_HEADS // HEADS, first : t + 1] for x in (key, value))
            scores = how.scaling * (k @ query[h, t])
            if how.softcap is not None:
                scores = how.softcap * torch.tanh(scores / how.softcap)
            weights = scores.exp()
            heads.append(weights @ v / (weights.sum() + (0 if how.sinks is None else how.sinks[h].exp())))
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def tensors(tokens: int, seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key and value of a flat row, [1, heads, T, D]."""
    generator = torch.Generator().manual_seed(seed)
    made = [
        torch.randn(1, heads, tokens, DIM, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    return [x.to(DEVICE, dtype).requires_grad_() for x in made]


def there(how: LayerAttention) -> LayerAttention:
    """The same question with its tensor on the device of the tests."""
    return replace(how, sinks=None if how.sinks is None else how.sinks.to(DEVICE))


@st.composite
def asked(draw: st.DrawFn) -> LayerAttention:
    sinks = torch.tensor(draw(st.lists(st.floats(-2, 2), min_size=HEADS, max_size=HEADS)), dtype=torch.float64)
    window = draw(st.none() | st.integers(1, 14))
    return LayerAttention(0.3, window, draw(st.none() | st.floats(0.5, 20)), draw(st.sampled_from([None, sinks])))


def assert_same(
    layout: object, parts: list[Tensor], how: LayerAttention, seed: int, dtype: torch.dtype = torch.float64
) -> None:
    """Compare values and gradients; `parts` holds the flat positions of each sample's tokens."""
    tokens = 1 + max(int(part.max()) for part in parts)
    row = tensors(tokens, seed, dtype)
    got = layout.to(DEVICE).attend(0, *row, there(how)).cpu()  # type: ignore[attr-defined]
    assert got.shape == (1, tokens, HEADS, DIM)
    assert got.dtype == dtype
    exact = [x.detach().cpu().double().requires_grad_() for x in row]
    results = [by_hand(*(x[0, :, part] for x in exact), how) for part in parts]
    weights = torch.randn(tokens, HEADS, DIM, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    # tokens that samples share (a prompt) have one result in the row and several here, all of them equal
    expected = torch.full_like(weights, torch.nan)
    loss = torch.zeros((), dtype=torch.float64)
    done: set[int] = set()
    for part, result in zip(parts, results, strict=True):
        fresh = [i for i, t in enumerate(part.tolist()) if t not in done]
        done |= set(part.tolist())
        expected[part] = result.detach()
        loss = loss + (weights[part[fresh]] * result[fresh]).sum()
    covered = ~expected.isnan().any(-1).any(-1)
    tolerance = {"rtol": 0, "atol": 1e-5} if dtype != torch.bfloat16 else {"rtol": 0, "atol": 5e-2}
    torch.testing.assert_close(got[0][covered].double(), expected[covered], **tolerance)
    (weights * got[0].double())[covered].sum().backward()
    loss.backward()
    for ours, theirs in zip(row, exact, strict=True):
        assert ours.grad.isfinite().all()
        torch.testing.assert_close(
            ours.grad.cpu().double(), theirs.grad, rtol=0, atol=1e-5 if dtype != torch.bfloat16 else 0.2
        )


@st.composite
def forests(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    """Prompts of 0 to 8 tokens with branches of 0 to 8; none is empty as a whole."""
    branches = st.lists(st.integers(0, 8), min_size=1, max_size=4)
    return draw(
        st.lists(st.tuples(st.integers(0, 8), branches).filter(lambda t: t[0] + max(t[1])), min_size=1, max_size=3)
    )


def forest_parts(forest: list[tuple[int, list[int]]]) -> list[Tensor]:
    """Flat positions of each sample of a forest, its prompt's tokens first."""
    parts, start = [], 0
    for prompt, sizes in forest:
        root = torch.arange(start, start + prompt)
        start += prompt
        for size in sizes:
            if prompt + size:
                parts.append(torch.cat([root, torch.arange(start, start + size)]))
            start += size
    return parts
