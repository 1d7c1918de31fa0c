"""Attention in two parts joined by their log-sum-exp: against sums over tokens in float64, and when it is used."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hybrid_rl.attention import joined, trees
from hybrid_rl.attention.attend import LayerAttention
from hybrid_rl.attention.trees import Trees
from hybrid_rl.policy.model import Policy
from tests.attention.samples import HEADS, assert_same, forest_parts, forests, tensors
from tests.policy.test_layout import assert_same_gradient, mixed, plain, run

CPU = torch.device("cpu")
FULL = LayerAttention(0.3)


def always(patch: pytest.MonkeyPatch, bucket_tokens: int = 16) -> None:
    """Join whatever the lengths are; parts of few tokens share a bucket, longer ones are alone."""
    patch.setattr(trees, "DENSE", -1)
    patch.setattr(joined, "BUCKET_TOKENS", bucket_tokens)


@example(forest=[(0, [3]), (4, [0, 2]), (5, [0])], seed=0)  # no prompt; an empty branch; only that
@example(forest=[(0, [2, 3, 4]), (8, [1, 1, 8])], seed=1)  # branches without a prompt
@given(forest=forests(), seed=st.integers(0, 9))
@settings(max_examples=60)
def test_parts_joined(forest: list[tuple[int, list[int]]], seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        always(patch)
        layout = Trees(forest)
        assert_same(layout, forest_parts(forest), FULL, seed)
        assert "_masked" not in vars(layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_parts_in_lower_precision(monkeypatch, dtype: torch.dtype) -> None:
    always(monkeypatch, 200)
    forest = [(90, [70, 3, 150, 64]), (33, [20])]
    assert_same(Trees(forest), forest_parts(forest), FULL, 0, dtype)


def test_gradients_of_a_model_do_not_depend_on_how_attention_is_computed(folder_of, reference_of, monkeypatch) -> None:
    always(monkeypatch)
    rollouts = mixed()
    for name in ("qwen3", "mistral"):  # grouped heads; windows, which have masks
        policy = Policy.load(folder_of(name), CPU)
        expected, expected_gradient = plain(reference_of(folder_of(name)).model, rollouts)
        for row_tokens in (2048, 40):
            logprobs, gradient = run(policy, rollouts, "trees", row_tokens)
            torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
            assert_same_gradient(gradient, expected_gradient)


@pytest.mark.parametrize(
    ("forest", "how", "way"),
    [
        ((64, [600, 590]), FULL, "_joined"),
        ((64, [600, 590]), LayerAttention(0.3, window=664), "_joined"),  # no sample reaches beyond it
        ((64, [600, 590]), LayerAttention(0.3, window=663), "_masked"),
        ((64, [600, 590]), LayerAttention(0.3, softcap=2.0), "_masked"),
        ((64, [600, 590]), LayerAttention(0.3, sinks=torch.zeros(HEADS)), "_masked"),
        ((20, [600, *[20] * 31]), FULL, "_joined"),  # one long branch would pad all others of its bucket
        ((60, [100, 90, 30]), FULL, "_masked"),
    ],
)
def test_long_samples_have_no_mask(forest: tuple[int, list[int]], how: LayerAttention, way: str) -> None:
    layout = Trees([forest])
    row = [x.float() for x in tensors(forest[0] + sum(forest[1]), 0)]
    layout.attend(0, *row, how)
    assert {"_joined", "_masked"} & vars(layout).keys() == {way}


def test_a_torch_without_the_kernel_computes_by_masks(monkeypatch) -> None:
    assert joined.works()
    monkeypatch.setattr(joined, "KERNEL", "no_such_kernel")
    joined.works.cache_clear()
    assert not joined.works()
    layout = Trees([(64, [600, 590])])
    layout.attend(0, *tensors(1254, 0), FULL)
    assert "_masked" in vars(layout)
    joined.works.cache_clear()
