"""What a layer may ask of attention (windows, softcap, sinks): every layout against sums over tokens in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hybrid_rl.attention.attend import LayerAttention, Packed, Padded
from hybrid_rl.attention.trees import Trees
from hybrid_rl.config import PolicyConfig
from hybrid_rl.engine.kv_cache import Decode, KVCache, Prefill
from hybrid_rl.model_folder.read import ModelError
from hybrid_rl.policy import load
from hybrid_rl.policy.model import Policy
from tests.attention.samples import HEADS, asked, assert_same, by_hand, forest_parts, forests, tensors, there
from tests.device import DEVICE
from tests.policy.test_layout import LAYOUTS, assert_same_gradient, mixed, plain, run

CPU = torch.device("cpu")


@pytest.mark.gpu
@example(
    forest=[(1, [8]), (8, [1])], how=LayerAttention(0.3, 1, 2.0), seed=0
)  # padding whose window lies beyond all keys
@given(forest=forests(), how=asked(), seed=st.integers(0, 9))
@settings(max_examples=40)
def test_trees(forest: list[tuple[int, list[int]]], how: LayerAttention, seed: int) -> None:
    assert_same(Trees(forest), forest_parts(forest), how, seed)


@pytest.mark.gpu
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4), how=asked(), seed=st.integers(0, 9))
@settings(max_examples=40)
def test_packed_and_padded_rows(lengths: list[int], how: LayerAttention, seed: int) -> None:
    ends = np.cumsum(lengths)
    assert_same(Packed(lengths), [torch.arange(end - n, end) for n, end in zip(lengths, ends, strict=True)], how, seed)
    width = max(lengths)
    assert_same(Padded(width), [torch.arange(i * width, i * width + width) for i in range(len(lengths))], how, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", [LayerAttention(0.3, 4), LayerAttention(0.3, 4, 2.0, torch.linspace(-1, 1, HEADS))])
def test_lower_precision(dtype: torch.dtype, how: LayerAttention) -> None:
    parts = [torch.cat([torch.arange(6), torch.arange(6 + 7 * i, 13 + 7 * i)]) for i in range(3)]
    assert_same(Trees([(6, [7, 7, 7])]), parts, how, 0, dtype)
    assert_same(Packed([20, 7]), [torch.arange(20), torch.arange(20, 27)], how, 0, dtype)


@pytest.mark.gpu
@given(
    prompts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    steps=st.integers(1, 6),
    how=asked(),
    seed=st.integers(0, 9),
)
@settings(max_examples=40)
def test_decoding_token_by_token_is_one_forward_of_the_whole(
    prompts: list[int], steps: int, how: LayerAttention, seed: int
) -> None:
    samples = [[x[0].detach() for x in tensors(n + steps, seed + i)] for i, n in enumerate(prompts)]
    how = there(how)
    expected = [by_hand(*sample, how) for sample in samples]
    prefill = Prefill(prompts)
    flat = [
        torch.cat([sample[x][:, :n] for sample, n in zip(samples, prompts, strict=True)], dim=1)[None] for x in range(3)
    ]
    first = prefill.attend(0, *flat, how)[0].split(prompts)
    cache = KVCache(len(prompts), max(prompts) + steps, [flat[1][0].shape], [flat[2][0].shape], torch.float64, DEVICE)
    for slot, n in enumerate(prompts):
        cache.store([slot], [prefill.keys[0][slot]], [prefill.values[0][slot]])
        torch.testing.assert_close(first[slot], expected[slot][:n], rtol=0, atol=1e-5)
    for step in range(steps):
        layout = Decode(cache, len(prompts))
        new = [
            torch.stack([s[x][:, n + step : n + step + 1] for s, n in zip(samples, prompts, strict=True)])
            for x in range(3)
        ]
        got = layout.attend(0, *new, how)
        for slot, n in enumerate(prompts):
            torch.testing.assert_close(got[slot, 0], expected[slot][n + step], rtol=0, atol=1e-5)


# ---- whole models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 3, 7, 12, 28, 29, 10_000])
def test_any_window_gives_the_numbers_of_plain_transformers(folder_of, reference_of, monkeypatch, window: int) -> None:
    """From one token to more than any sample has; prompts have 3 to 9 tokens, samples up to 29."""
    policy, reference, rollouts = (
        Policy.load(folder_of("mistral"), CPU),
        reference_of(folder_of("mistral")).model,
        mixed(),
    )
    for model in (policy.model, reference):
        monkeypatch.setattr(model.config, "sliding_window", window)  # the layers look there in each forward
    expected, expected_gradient = plain(reference, rollouts)
    for layout in LAYOUTS:
        logprobs, gradient = run(policy, rollouts, layout, 2048)
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
        assert_same_gradient(gradient, expected_gradient)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_logprobs_are_those_of_float64(folder_of, reference_of, name: str) -> None:
    policy, exact, rollouts = Policy.load(folder_of(name), CPU), reference_of(folder_of(name)).exact, mixed()
    expected = plain(exact, rollouts)[0].double()
    for layout in LAYOUTS:
        torch.testing.assert_close(run(policy, rollouts, layout, 2048)[0].double(), expected, rtol=0, atol=1e-5)


def test_a_window_that_no_sample_reaches_builds_no_mask() -> None:
    packed, padded, trees = Packed([5, 12]), Padded(17), Trees([(5, [12, 3])])
    for layout, tokens in ((packed, 17), (padded, 17), (trees, 20)):
        layout.attend(0, *tensors(tokens, 0), LayerAttention(0.3, window=17))
        layout.attend(1, *tensors(tokens, 0), LayerAttention(0.3))
    assert not packed._bands._made
    assert not padded._bands._made
    assert not trees._masked._bands._made
    assert [list(bucket._seen) for bucket in trees._masked.buckets] == [[None]]


# ---- what loading compares -------------------------------------------------------------------------------------------


def test_a_window_that_is_not_handed_to_attention_is_refused_where_rows_reach_it(folder_of) -> None:
    """With use_sliding_window Qwen2-MoE's windows are in its masks alone, which layouts do not use."""
    settings = PolicyConfig(row_tokens=64)
    with pytest.raises(ModelError, match=r"layer 0 has a window of 63 tokens .* policy.row_tokens=63 or less"):
        Policy.load(folder_of("qwen2_moe_window"), CPU, settings)
    Policy.load(folder_of("qwen2_moe_window"), CPU, replace(settings, row_tokens=63))


def test_logits_that_are_changed_in_an_unknown_way_are_refused(folder_of, monkeypatch) -> None:
    monkeypatch.setattr(load, "logits_of", lambda head, config: head)
    for name in ("granite_scaled", "cohere", "gemma2"):
        with pytest.raises(ModelError, match="changes its logits after the output embeddings"):
            Policy.load(folder_of(name), CPU)


def test_attention_other_than_the_models_own_is_refused(folder_of, monkeypatch) -> None:
    attend = Packed.attend
    monkeypatch.setattr(
        Packed, "attend", lambda self, layer, q, k, v, how: attend(self, layer, q, k, v, replace(how, softcap=None))
    )
    with pytest.raises(ModelError, match="computes attention in a way of its own"):
        Policy.load(folder_of("gemma2"), CPU)
