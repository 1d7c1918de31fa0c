"""Advantages: the values that their docstrings promise, plain-Python float64 loops as the other opinion, and what must
hold for any rewards."""

import inspect
import math
from functools import partial
from importlib import import_module
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch
import yaml
from hydra.utils import instantiate
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rl.algo import gae, gdpo, grpo, max_rl, mean_only, opd, opo, pass_at_k, reinforce_pp, remax, rloo, vtrace
from hybrid_rl.algo.batch import Scored
from tests.batches import batches, close, group, number, rollouts, scored

OPTIONS = Path(__file__).parents[2] / "conf" / "algo" / "advantage"
# estimators whose advantage is a rollout's place in its group and nothing else
RELATIVE = {m.__name__.split(".")[-1]: m.advantages for m in (grpo, mean_only, rloo, max_rl, opo)} | {
    "pass_at_2": partial(pass_at_k.advantages, k=2)
}
each_relative = pytest.mark.parametrize("estimator", RELATIVE.values(), ids=RELATIVE.keys())


# ---- the values of the design -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (partial(grpo.advantages, eps=0.0), [1.5, -0.5, -0.5, -0.5]),
        (grpo.advantages, [1.5 / (1 + 2e-6)] + [-0.5 / (1 + 2e-6)] * 3),  # σ = 0.5
        (mean_only.advantages, [0.75, -0.25, -0.25, -0.25]),
        (rloo.advantages, [1, -1 / 3, -1 / 3, -1 / 3]),
        (max_rl.advantages, [3, -1, -1, -1]),
        (opo.advantages, [0.75, -0.25, -0.25, -0.25]),  # equal lengths
        (partial(pass_at_k.advantages, k=2), [1, 0, 0, 0]),
        (pass_at_k.advantages, [1, 0, 0, 0]),
        (reinforce_pp.advantages, [1.5 / math.sqrt(1 + 4e-8)] + [-0.5 / math.sqrt(1 + 4e-8)] * 3),  # var = 0.25
        (
            partial(reinforce_pp.advantages, baseline=False),
            [1.5 / math.sqrt(1 + 4e-8)] + [-0.5 / math.sqrt(1 + 4e-8)] * 3,
        ),
    ],
)
def test_one_success_in_four(estimator, expected: list[float]) -> None:
    close(estimator(scored([[1, 0, 0, 0]])), expected, rel=0, abs=1e-14)


def test_float32_values_of_the_design_table() -> None:
    one = scored([[1, 0, 0, 0]], dtype=torch.float32)
    torch.testing.assert_close(
        grpo.advantages(one), torch.tensor([1.5, -0.5, -0.5, -0.5]), rtol=0, atol=4e-6
    )  # eps / σ = 2e-6
    assert mean_only.advantages(one).tolist() == [0.75, -0.25, -0.25, -0.25]
    assert max_rl.advantages(one).tolist() == [3, -1, -1, -1]


def test_values_of_the_docstrings() -> None:
    close(opo.advantages(scored([[1, 0, 0, 0]], [3, 1, 2, 2])), [0.625, -0.375, -0.375, -0.375])
    close(pass_at_k.advantages(scored([[3, 1, 0, 0]]), k=2), [8 / 3, 2 / 3, 0, 0])
    close(remax.advantages(scored([[1, 0, 0, 0]], greedy=[1, 1, 1, 1])), [0, -1, -1, -1])
    critic = scored([[1]], [3], values=[0.5, 0.5, 0.5], old_logprobs=[math.log(0.5), 0, 0])
    advantages, targets = gae.advantages(critic, lam=0.5, whiten=False)
    close(advantages, [0.125, 0.25, 0.5])
    close(targets, [0.625, 0.75, 1])
    advantages, targets = vtrace.advantages(critic)
    close(advantages, [0.25, 0.5, 0.5])
    close(targets, [0.75, 1, 1])
    close(opd.advantages(scored([[7]], teacher_logprobs=[-1], behaviour_logprobs=[-3], old_logprobs=[-5])), [2])


# ---- relative to the group: loops -------------------------------------------------------------------------------------


def by_hand(name: str, r: list[float], lengths: list[int]) -> list[float]:
    """One group in plain Python; its own words for each formula."""
    if len(r) == 1 or max(r) == min(r):
        return [0.0] * len(r)
    if name == "grpo":
        return [(x - fmean(r)) / (stdev(r) + 1e-6) for x in r]
    if name == "mean_only":
        return [x - fmean(r) for x in r]
    if name == "rloo":
        return [x - fmean(r[:i] + r[i + 1 :]) for i, x in enumerate(r)]
    if name == "max_rl":
        return [x / fmean(r) - 1 for x in r] if fmean(r) > 0 else [0.0] * len(r)
    if name == "opo":
        per_token = [x for x, n in zip(r, lengths, strict=True) for _ in range(n)]
        return [x - fmean(per_token) for x in r]
    return by_subsets(r, 2)


def by_subsets(r: list[float], k: int) -> list[float]:
    def added(i: int) -> float:
        others = [r[j] for j in range(len(r)) if j != i]
        return fmean(max(r[i], *company) - max(company) for company in combinations(others, k - 1))

    return [added(i) for i in range(len(r))]


@pytest.mark.parametrize("name", RELATIVE)
@given(groups=st.lists(group, min_size=1, max_size=4), data=st.data())
def test_groups_by_hand(name: str, groups: list[list[float]], data) -> None:
    """Values, order, and that no group hears of another: each is computed alone here."""
    lengths = [data.draw(st.lists(st.integers(1, 9), min_size=len(g), max_size=len(g))) for g in groups]
    flat = [n for own in lengths for n in own]
    expected = [a for g, own in zip(groups, lengths, strict=True) for a in by_hand(name, g, own)]
    close(RELATIVE[name](scored(groups, flat)), expected, rel=1e-9, abs=1e-9)


def test_grpo_divides_by_the_sample_deviation_plus_eps() -> None:
    values = [0.3, -1.7, 2.0, 0.9, 0.0]
    for eps in (1e-6, 0.5):
        expected = [(v - fmean(values)) / (stdev(values) + eps) for v in values]
        close(grpo.advantages(scored([values]), eps), expected, abs=1e-12)


@given(values=group, k=st.integers(2, 7))
def test_pass_at_k_is_the_mean_over_all_subsets(values: list[float], k: int) -> None:
    assume(k <= len(values))
    advantages = pass_at_k.advantages(scored([values]), k)
    close(advantages, by_subsets(values, k), rel=1e-12, abs=1e-12)
    assert advantages.min() >= 0
    # they do not sum to zero: their mean is what the k-th rollout is worth to the best of k
    best = fmean(max(s) for s in combinations(values, k))
    less = fmean(max(s) for s in combinations(values, k - 1))
    assert advantages.mean().item() == pytest.approx(best - less, abs=1e-12)


def test_pass_at_group_size_rewards_the_single_best_alone() -> None:
    close(pass_at_k.advantages(scored([[0.25, 2.0, 1.5, -1.0]])), [0, 0.5, 0, 0])
    assert pass_at_k.advantages(scored([[2.0, 1.0, 2.0, 0.0]])).tolist() == [0] * 4  # a tie of the best
    large = pass_at_k.advantages(scored([[0.0] * 1000 + [1.0]]), k=500)  # binomials far above the largest float
    assert large.tolist() == [0.0] * 1000 + [1.0]


# ---- relative to the group: what must hold for any rewards ---------------------------------------------------------------


@each_relative
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_without_a_signal_has_no_advantage(estimator, dtype: torch.dtype) -> None:
    for value in (0.5, 0.0, -2.0, 0.1, 1e6 / 3):  # 0.1 · 7 / 7 need not be 0.1: rounding must not become a signal
        a = estimator(scored([[value] * 7, [1.0, 0.0], [value] * 16], list(range(1, 26)), dtype))
        assert a[:7].tolist() == [0.0] * 7
        assert a[9:].tolist() == [0.0] * 16
        assert a[7] > 0


@pytest.mark.parametrize("estimator", [e for n, e in RELATIVE.items() if not n.startswith("pass")])
@given(value=st.floats(-1e30, 1e30))
def test_a_single_rollout_has_no_advantage_and_not_its_reward(estimator, value: float) -> None:
    assert estimator(scored([[value], [1.0, 0.0], [value]]))[[0, 3]].tolist() == [0, 0]


@each_relative
def test_the_same_parts_in_another_order_are_the_same_reward(estimator) -> None:
    first, second = 0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1
    assert first != second
    for scale in (1.0, 1e9):  # there a last place is far more than any eps
        assert estimator(scored([[first * scale, second * scale, first * scale]])).tolist() == [0] * 3
    penalties = [0.1, 0.2, 0.3, 0.3, 0.2, 0.1]
    assert estimator(scored([[0.0, 0.0]], [3, 3], penalties=penalties)).tolist() == [0, 0]


@each_relative
def test_a_small_difference_that_is_no_rounding_counts(estimator) -> None:
    a = estimator(scored([[1000.0, 1000.0 + 2**-10]], dtype=torch.float32))  # sixteen units in the last place
    assert a[1] > 0
    assert a[0] <= 0


@each_relative
@given(values=group, data=st.data())
def test_advantages_follow_a_permutation(estimator, values: list[float], data) -> None:
    order = data.draw(st.permutations(range(len(values))))
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=len(values), max_size=len(values)))
    a = estimator(scored([values], lengths))
    permuted = estimator(scored([[values[i] for i in order]], [lengths[i] for i in order]))
    torch.testing.assert_close(permuted, a[list(order)], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("estimator", [e for n, e in RELATIVE.items() if n != "max_rl"])
@given(values=group, shift=st.integers(-8, 8))
def test_a_shift_changes_nothing(estimator, values: list[float], shift: int) -> None:
    shifted = estimator(scored([[v + shift for v in values]]))
    torch.testing.assert_close(shifted, estimator(scored([values])), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("estimator", [grpo.advantages, mean_only.advantages, rloo.advantages, max_rl.advantages])
@given(values=group)
def test_advantages_of_a_group_sum_to_zero(estimator, values: list[float]) -> None:
    a = estimator(scored([values]))
    assert abs(a.sum().item()) < 1e-9 * max(1.0, a.abs().max().item())
    mean = fmean(values)
    assert all(
        math.copysign(1, x) == math.copysign(1, v - mean)
        for x, v in zip(a.tolist(), values, strict=True)
        if abs(x) > 1e-9
    )


@given(values=group, lengths=st.lists(st.integers(1, 9), min_size=7, max_size=7))
def test_opo_sums_to_zero_over_tokens(values: list[float], lengths: list[int]) -> None:
    batch = scored([values], lengths[: len(values)])
    assert abs((opo.advantages(batch) * batch.lengths).sum().item()) < 1e-9


@pytest.mark.parametrize("name", RELATIVE)
@given(values=group, scale=st.sampled_from([0.125, 0.5, 2.0, 64.0]))
def test_scaling_the_rewards(name: str, values: list[float], scale: float) -> None:
    a, scaled = RELATIVE[name](scored([values])), RELATIVE[name](scored([[scale * v for v in values]]))
    if name == "max_rl":
        torch.testing.assert_close(scaled, a)  # does not care
    elif name != "grpo":
        torch.testing.assert_close(scaled, scale * a)  # linear
    elif max(values) - min(values) > 0.5:
        torch.testing.assert_close(scaled, a, rtol=1e-4, atol=1e-4)  # but for eps


@pytest.mark.parametrize("values", [[-1.0, -2.0], [1.0, -1.0], [0.0, 0.0], [0.1, 0.2, -0.3], [3.0, -1.0, -2.5]])
def test_max_rl_needs_a_positive_mean(values: list[float]) -> None:
    assert sum([0.1, 0.2, -0.3]) > 0  # of rounding: a divisor of 1e-17
    for dtype in (torch.float32, torch.float64):
        assert max_rl.advantages(scored([values], dtype=dtype)).tolist() == [0] * len(values)


@given(batch=batches())
def test_penalties_are_part_of_the_reward(batch: Scored) -> None:
    own = [
        outcome + sum(p) for outcome, (p,) in zip(batch.outcomes.tolist(), rollouts(batch, "penalties"), strict=True)
    ]
    groups = [part.tolist() for part in torch.tensor(own, dtype=torch.float64).split(list(batch.group_sizes))]
    close(mean_only.advantages(batch), [a for g in groups for a in by_hand("mean_only", g, [])])


# ---- GDPO: parts of the reward ----------------------------------------------------------------------------------------------


def gdpo_by_hand(
    groups: list[list[tuple[float, float]]], weights: tuple[float, float], kept: list[bool]
) -> list[float]:
    """arXiv 2601.05242: each part normalised in its group, the weighted sum normalised over the batch."""

    def normed(values: list[float]) -> list[float]:
        spread = stdev(values) if len(values) > 1 and max(values) > min(values) else 0.0
        return [(v - fmean(values)) / (spread + 1e-6) if spread else 0.0 for v in values]

    totals: list[float] = []
    for g in groups:
        columns = [normed([r[k] for r in g]) for k in (0, 1)]
        totals += [sum(w * c[i] for w, c in zip(weights, columns, strict=True)) for i in range(len(g))]
    own = [t for t, k in zip(totals, kept, strict=True) if k]
    if len(own) < 2 or max(own) - min(own) < 1e-9:
        return [0.0] * len(totals)
    of_kept = iter(normed(own))
    return [next(of_kept) if k else 0.0 for k in kept]


@given(
    groups=st.lists(st.lists(st.tuples(number, number), min_size=1, max_size=5), min_size=1, max_size=4),
    weights=st.sampled_from([(1.0, 1.0), (0.25, 2.0), (1.0, 0.0)]),
    data=st.data(),
)
def test_gdpo_by_hand(groups: list[list[tuple[float, float]]], weights: tuple[float, float], data) -> None:
    count = sum(map(len, groups))
    kept = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    batch = scored([[a + b for a, b in g] for g in groups], kept=kept)
    batch.parts = {
        name: torch.tensor([r[k] for g in groups for r in g], dtype=torch.float64)
        for k, name in enumerate(("right", "form"))
    }
    expected = gdpo_by_hand(groups, weights, kept)
    close(gdpo.advantages(batch, {"right": weights[0], "form": weights[1]}), expected, rel=1e-7, abs=1e-7)
    if weights == (1.0, 1.0):
        close(gdpo.advantages(batch), expected, rel=1e-7, abs=1e-7)


def test_gdpo_tells_apart_what_one_sum_hides_and_names_a_part_that_is_not_there() -> None:
    batch = scored([[1.0, 1.0, 1.0]])
    batch.parts = {
        "right": torch.tensor([1.0, 1, 0], dtype=torch.float64),
        "form": torch.tensor([0.0, 0, 1], dtype=torch.float64),
    }
    assert grpo.advantages(batch).tolist() == [0] * 3
    assert gdpo.advantages(batch, {"right": 2.0, "form": 1.0})[0] > 0.5
    with pytest.raises(
        ValueError, match=r"algo\.advantage\.weights names 'rigth', and the parts of the reward are form, right"
    ):
        gdpo.advantages(batch, {"rigth": 1.0})


# ---- the options ------------------------------------------------------------------------------------------------------------


def test_every_estimator_has_its_option_and_no_other() -> None:
    estimators = {p.stem for p in Path(grpo.__file__).parent.glob("*.py") if "\ndef advantages(" in p.read_text()}
    assert {p.stem for p in OPTIONS.glob("*.yaml")} == estimators
    assert len(estimators) == 12


@pytest.mark.parametrize("path", sorted(OPTIONS.glob("*.yaml")), ids=lambda p: p.stem)
def test_an_option_states_the_defaults_of_its_function(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# ")
    options = yaml.safe_load(text)
    function = import_module(f"hybrid_rl.algo.{path.stem}").advantages
    assert options.pop("_target_") == f"hybrid_rl.algo.{path.stem}.advantages"
    assert options == {n: p.default for n, p in inspect.signature(function).parameters.items() if n != "batch"}


@pytest.mark.parametrize("path", sorted(OPTIONS.glob("*.yaml")), ids=lambda p: p.stem)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_option_computes_finite_numbers_of_the_right_shape(path: Path, dtype: torch.dtype) -> None:
    tokens = {name: [0.5, -0.5, 0.25, 0, 1, 2, 3] for name in ("values", "teacher_logprobs")}
    batch = scored([[1, 0, 0, 0.5]], [1, 2, 3, 1], dtype, greedy=[0.5] * 4, **tokens)
    before = {f: v.clone() for f in batch.__slots__ if isinstance(v := getattr(batch, f), Tensor)}
    result = instantiate(yaml.safe_load(path.read_text()), _partial_=True)(batch)
    for a in result if isinstance(result, tuple) else (result,):
        assert a.shape in {batch.outcomes.shape, batch.old_logprobs.shape}
        assert a.dtype == dtype
        assert a.isfinite().all()
    assert isinstance(result, tuple) == (path.stem in {"gae", "vtrace"})
    for name, value in before.items():
        assert torch.equal(getattr(batch, name), value), f"{name} was written to"


def test_opd_takes_a_nested_partial() -> None:
    nested = {"_target_": "hybrid_rl.algo.rloo.advantages", "_partial_": True}
    option = yaml.safe_load((OPTIONS / "opd.yaml").read_text()) | {"reward": nested}
    batch = scored([[1, 0]], [1, 2], teacher_logprobs=[-1, -1, -1], behaviour_logprobs=[-2, -1, -1])
    close(instantiate(option, _partial_=True)(batch), [2, -1, -1])
