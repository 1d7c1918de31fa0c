import itertools
import math
import random
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rl.model_folder.read import ModelError
from hybrid_rl.policy.layout import best_fit_decreasing, pack, sampled_tokens
from hybrid_rl.policy.model import Policy
from hybrid_rl.types import Rollout
from tests.device import DEVICE, in_float32

LAYOUTS = ("padded", "packed", "trees")
CPU = torch.device("cpu")


def rollout(prompt: Sequence[int], segments: Sequence[tuple[bool, Sequence[int]]], group: int = 0) -> Rollout:
    """Segments are (sampled?, token ids); log-probabilities are made up, one value a token."""
    r = Rollout("t", group, 0, 0, list(prompt))
    for sampled, ids in segments:
        if sampled:
            r.add_sampled(ids, [-(len(r.token_ids) + j) / 64 for j in range(len(ids))], [(0, len(ids))])
        else:
            r.add_observed(ids)
    return r


@st.composite
def batches(draw: st.DrawFn) -> list[Rollout]:
    """Groups with a shared prompt, lengths from one token on, none to three segments, sampled or observed."""
    tokens = st.lists(st.integers(0, 255), max_size=6)
    rollouts = []
    for group in range(draw(st.integers(1, 3))):
        prompt = draw(st.lists(st.integers(0, 255), min_size=1, max_size=8))
        for segments in draw(st.lists(st.lists(st.tuples(st.booleans(), tokens), max_size=3), min_size=1, max_size=4)):
            rollouts.append(rollout(prompt, segments, group))
    return rollouts


def mixed(seed: int = 0) -> list[Rollout]:
    """A batch with every case at once, of 32 tokens a sample at most."""
    rng = random.Random(seed)
    ids = lambda n: [rng.randrange(256) for _ in range(n)]  # noqa: E731
    batch = []
    for group in range(3):
        prompt = ids(rng.randint(3, 9))
        batch += [rollout(prompt, [(True, ids(rng.randint(1, 20)))], group) for _ in range(4)]
        batch.append(
            rollout(prompt, [(True, ids(4)), (False, ids(5)), (True, ids(3))], group)
        )  # a tool's answer between
        batch.append(rollout(prompt, [], group))  # an empty completion
    return [
        *batch,
        rollout([7], [(True, [9])]),
        rollout(ids(6), [(False, ids(2)), (True, ids(2))]),
        rollout([7], [(True, ids(12))]),
    ]


def run(
    policy: Policy, rollouts: list[Rollout], layout: str, row_tokens: int, temperature: float = 0.6
) -> tuple[Tensor, Tensor]:
    """log π [N] of all sampled tokens, and the gradient of their weighted token mean, all parameters end to end."""
    weights = torch.linspace(-1, 1, len(sampled_tokens(rollouts)))
    logprobs = torch.full((len(weights),), math.nan)
    policy.model.zero_grad()
    for row in pack(rollouts, layout, row_tokens):
        row_logprobs, _ = policy.logprobs(row.to(policy.device), temperature)
        (weights[row.token_index] * row_logprobs.cpu()).sum().div(len(weights)).backward()
        logprobs[row.token_index] = row_logprobs.detach().cpu()
    return logprobs, torch.cat([p.grad.flatten().cpu() for p in policy.model.parameters()])


def plain(model, rollouts: list[Rollout], temperature: float = 0.6) -> tuple[Tensor, Tensor]:
    """The same two with plain transformers, each sample alone."""
    parts = []
    for r in rollouts:
        at = torch.tensor([t for t, m in enumerate(r.loss_mask) if m], dtype=torch.int64)
        ids = torch.tensor(r.token_ids)
        rows = (model(ids[None]).logits[0].float() / temperature).log_softmax(-1)
        parts.append(rows[at - 1, ids[at]])
    logprobs = torch.cat(parts)
    model.zero_grad()
    (torch.linspace(-1, 1, len(logprobs)) * logprobs).sum().div(len(logprobs)).backward()
    return logprobs.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def assert_same_gradient(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
    assert (actual - expected).norm() < 1e-5 * expected.norm()


# ---- filling bins -----------------------------------------------------------------------------------------------------


@given(capacity=st.integers(1, 50), data=st.data())
def test_best_fit_decreasing(capacity: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, capacity), max_size=40))
    bins = best_fit_decreasing(sizes, capacity)
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in b) for b in bins]
    assert all(b for b in bins)
    assert all(load <= capacity for load in loads)
    # what opened a bin had no room in any bin before it
    assert all(
        loads[earlier] + sizes[bins[later][0]] > capacity for later in range(len(bins)) for earlier in range(later)
    )
    lower = max(math.ceil(sum(sizes) / capacity), sum(size > capacity / 2 for size in sizes))
    assert len(bins) <= 2 * lower + 1  # any two neighbours together fill more than one bin
    assert best_fit_decreasing(sizes, capacity) == bins


@given(splits=st.lists(st.lists(st.integers(1, 99), max_size=5), min_size=1, max_size=8))
def test_best_fit_decreasing_is_within_its_bound_of_the_best(splits: list[list[int]]) -> None:
    # cut each full bin of 100 at random points: the optimum is then known to be the number of bins
    sizes = [b - a for cuts in splits for edges in [sorted({0, *cuts, 100})] for a, b in itertools.pairwise(edges)]
    assert len(best_fit_decreasing(sizes, 100)) <= 11 / 9 * len(splits) + 6 / 9


def test_a_sample_larger_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="11 tokens does not fit a row of 10"):
        best_fit_decreasing([3, 11], 10)
    for layout in LAYOUTS:
        with pytest.raises(ValueError, match="does not fit a row of 10"):
            pack([rollout([1, 2], [(True, [3])]), rollout(range(8), [(True, [1, 2, 3])])], layout, 10)


def test_128_rollouts_of_150_tokens_make_10_rows_of_2048() -> None:
    rollouts = [rollout(range(100), [(True, range(50))], group=i) for i in range(128)]
    rows = pack(rollouts, "packed", 2048)
    assert [len(row.input_ids) // 150 for row in rows] == [13] * 9 + [11]
    assert len(rows) == 10
    # as trees the sixteen completions of a group share their prompt: 128 · 50 + 8 · 100 tokens
    groups = [rollout([g] * 100, [(True, range(50))], group=g) for g in range(8) for _ in range(16)]
    trees = pack(groups, "trees", 2048)
    assert len(trees) == 4
    assert sum(len(row.input_ids) for row in trees) == 128 * 50 + 8 * 100


def test_the_branches_of_a_large_tree_fill_rows() -> None:
    """16 completions of 100 to 1,000 tokens after one prompt of 50: no fewer rows could hold them, each with the prompt."""
    numbers = random.Random(0)
    group = [rollout([1] * 50, [(True, [2] * numbers.randint(100, 1000))]) for _ in range(16)]
    rows = pack(group, "trees", 2048)
    assert len(rows) == math.ceil(sum(r.sampled for r in group) / (2048 - 50))
    assert sum(len(row.input_ids) for row in rows) == sum(r.sampled for r in group) + 50 * len(rows)


def test_trees_are_cut_if_that_saves_rows() -> None:
    """Trees of 60 % of a row would leave 40 % of each empty; a long prompt is not repeated for that."""
    trees = [rollout([g] * 10, [(True, [2] * 40)]) for g in range(8) for _ in range(15)]
    assert [len(row.input_ids) for row in pack(trees, "trees", 1000)] == [980, 990, 980, 990, 980]
    prompts = [rollout([g] * 300, [(True, [2] * 20)]) for g in range(8) for _ in range(15)]
    assert [len(row.input_ids) for row in pack(prompts, "trees", 1000)] == [600] * 8


def test_rows_that_wait_take_little_memory() -> None:
    group = [rollout([7] * 100, [(True, [8] * 1000)]) for _ in range(64)]
    for layout in LAYOUTS:
        tracemalloc.start()
        try:
            rows = pack(group, layout, 4096)
            assert tracemalloc.get_traced_memory()[1] < 0.2 * 8 * 1100 * len(group)  # of the ids as int64
            assert sum(len(row.targets) for row in rows) == 64_000
            assert tracemalloc.get_traced_memory()[1] < 128 * 4096  # one row at a time
        finally:
            tracemalloc.stop()
        assert [len(row.input_ids) for row in rows[:2]] == [len(rows[0].input_ids), len(rows[1].input_ids)]
        with pytest.raises(IndexError):
            rows[len(rows)]


# ---- what a row says about its tokens ---------------------------------------------------------------------------------


@given(rollouts=batches(), layout=st.sampled_from(LAYOUTS), row_tokens=st.sampled_from([26, 40, 2048]))
@settings(max_examples=150)
def test_every_sampled_token_is_predicted_once_from_the_token_before_it(
    rollouts: list[Rollout], layout: str, row_tokens: int
) -> None:
    places = [(i, t) for i, r in enumerate(rollouts) for t, m in enumerate(r.loss_mask) if m]
    facts = sampled_tokens(rollouts)
    assert len(facts) == len(places)
    assert facts.rollout_index.tolist() == [i for i, _ in places]
    assert facts.behaviour_logprobs.tolist() == [rollouts[i].logprobs[t] for i, t in places]
    rows = pack(rollouts, layout, row_tokens)
    assert sorted(n for row in rows for n in row.token_index.tolist()) == list(range(len(places)))
    assert all(len(row.input_ids) <= row_tokens for row in rows)
    for row in rows:
        for at, target, number in zip(
            row.predict_at.tolist(), row.targets.tolist(), row.token_index.tolist(), strict=True
        ):
            i, t = places[number]
            ids = rollouts[i].token_ids
            assert (target, row.input_ids[at].item(), row.position_ids[at].item()) == (ids[t], ids[t - 1], t - 1)
    if layout == "packed":
        positions = sorted(p for row in rows for p in row.position_ids.tolist())
        assert positions == sorted(p for r in rollouts for p in range(len(r.token_ids)))


# ---- the layouts compute the same numbers ------------------------------------------------------------------------------


@pytest.mark.gpu
def test_logprobs_and_gradients_are_those_of_plain_transformers(any_folder: Path, reference_of) -> None:
    policy, rollouts = Policy.load(any_folder, DEVICE, in_float32()), mixed()
    expected, expected_gradient = plain(reference_of(any_folder).model, rollouts)
    for layout in LAYOUTS:
        logprobs, gradient = run(policy, rollouts, layout, 2048)
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
        assert_same_gradient(gradient, expected_gradient)


@pytest.mark.slow
@pytest.mark.gpu
@given(rollouts=batches().filter(lambda rollouts: any(r.sampled for r in rollouts)))
@settings(max_examples=25)
def test_any_batch_has_one_result_in_all_layouts(tiny_folder: Path, reference_of, rollouts: list[Rollout]) -> None:
    policy = Policy.load(tiny_folder, DEVICE, in_float32())
    expected, expected_gradient = plain(reference_of(tiny_folder).model, rollouts)
    for layout in LAYOUTS:
        logprobs, gradient = run(policy, rollouts, layout, 40)
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(
            gradient, expected_gradient, rtol=1e-3, atol=1e-4 * expected_gradient.abs().max().item() + 1e-7
        )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_gradient_of_the_token_mean_does_not_depend_on_rows(folder_of, name: str) -> None:
    policy, rollouts = Policy.load(folder_of(name), DEVICE, in_float32()), mixed(1)
    logprobs, gradient = run(policy, rollouts, "padded", 2048)
    for layout in LAYOUTS:
        rows = [len(pack(rollouts, layout, row_tokens)) for row_tokens in (2048, 64, 40)]
        assert rows[0] == 1 < rows[1] < rows[2]
        for row_tokens in (2048, 64, 40):
            other_logprobs, other = run(policy, rollouts, layout, row_tokens)
            torch.testing.assert_close(other_logprobs, logprobs, rtol=0, atol=1e-5)
            assert_same_gradient(other, gradient)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_of_a_row_do_not_see_each_other(policy: Policy, layout: str) -> None:
    rollouts = mixed(2)
    changed = list(rollouts)
    # other tokens in one branch of a tree, in a whole sample, and a sample's neighbour of one token
    old = rollouts[1]
    changed[1] = rollout(
        old.token_ids[: old.prompt_length], [(True, [(t + 1) % 256 for t in old.token_ids[old.prompt_length :]])]
    )
    changed[-2] = rollout([11] * 6, [(False, [12, 13]), (True, [14, 15])])
    assert len(pack(rollouts, layout, 2048)) == 1
    assert [len(r.token_ids) for r in rollouts] == [len(r.token_ids) for r in changed]
    index = sampled_tokens(rollouts).rollout_index
    before, after = run(policy, rollouts, layout, 2048)[0], run(policy, changed, layout, 2048)[0]
    touched = (index == 1) | (index == len(rollouts) - 2)
    assert (before[touched] != after[touched]).all()
    torch.testing.assert_close(after[~touched], before[~touched], rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_without_a_sampled_token_have_loss_zero_and_still_run_backward(policy: Policy, layout: str) -> None:
    (row,) = pack([rollout([1, 2, 3], []), rollout([4], [(False, [5])])], layout, 64)
    logprobs, entropy = policy.logprobs(row.to(DEVICE), 1.0)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() == 0 for p in policy.model.parameters())


# ---- which models can be used -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mamba", "linear_attention"), ("bloom_own_attention", "see each other"),
    ],
)  # fmt: skip
def test_a_model_that_would_be_computed_wrongly_is_refused(folder_of, name: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        Policy.load(folder_of(name), CPU)


def test_a_folder_that_is_no_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        Policy.load(tmp_path / "nowhere", CPU)
