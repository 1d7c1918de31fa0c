"""What weighs a token besides its loss: aggregation, corrections of trainer and engine's mismatch, the overlong
penalty."""

import inspect
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from hydra.utils import get_method, instantiate
from hypothesis import assume, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from hybrid_rl.algo import aggregation, icepop, k3_mask, overlong, ratio, seq_mask, tis
from hybrid_rl.algo.batch import Scored

CONF = Path(__file__).parents[2] / "conf/algo"
AGGREGATIONS = [aggregation.token_mean, aggregation.seq_mean, aggregation.fixed]
CORRECTIONS = [tis.correct, icepop.correct, seq_mask.correct, k3_mask.correct]
every_aggregation = pytest.mark.parametrize("aggregate", AGGREGATIONS)
every_correction = pytest.mark.parametrize("correct", CORRECTIONS, ids=lambda f: f.__module__.rpartition(".")[2])

# ---- aggregation ----------------------------------------------------------------------------------------------------


def aggregated_by_hand(name: str, kept: list[bool], rollout: list[int], losses: list[float], max_tokens: int) -> float:
    lengths = Counter(r for r, k in zip(rollout, kept, strict=True) if k)
    if not lengths:
        return 0.0
    everyone = len(set(rollout))
    of_rollout = {r: sum(x for x, k, s in zip(losses, kept, rollout, strict=True) if k and s == r) for r in lengths}
    if name == "token_mean":
        return sum(of_rollout.values()) / sum(lengths.values())
    if name == "seq_mean":
        return sum(total / lengths[r] for r, total in of_rollout.items()) / everyone
    return sum(of_rollout.values()) / (everyone * max_tokens)


@every_aggregation
@given(
    tokens=st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.floats(-5, 5)), min_size=1, max_size=20),
    names=st.permutations([0, 3, 17, 40, 999]),
    max_tokens=st.integers(1, 64),
)
def test_aggregation_is_the_definition(
    aggregate, tokens: list[tuple[bool, int, float]], names: list[int], max_tokens: int
) -> None:
    kept, rollout, losses = ([t[0] for t in tokens], [names[t[1]] for t in tokens], [t[2] for t in tokens])
    weights, divisor = aggregate(torch.tensor(kept), torch.tensor(rollout), max_tokens)
    assert (weights.dtype, weights.shape, type(divisor)) == (torch.float32, (len(tokens),), float)
    assert divisor >= 1
    assert [w > 0 for w in weights.tolist()] == kept
    value = (weights.double() * torch.tensor(losses, dtype=torch.float64)).sum().item() / divisor
    assert value == pytest.approx(
        aggregated_by_hand(aggregate.__name__, kept, rollout, losses, max_tokens), rel=1e-6, abs=1e-6
    )


def test_aggregations_of_a_long_and_a_short_rollout() -> None:
    kept, rollout = torch.tensor([True] * 5 + [False, False]), torch.tensor([0, 0, 0, 0, 1, 1, 2])
    for aggregate, expected in zip(AGGREGATIONS, ([1.0] * 5, [0.25] * 4 + [1.0], [1.0] * 5), strict=True):
        weights, divisor = aggregate(kept, rollout, 8)
        assert weights.tolist() == [*expected, 0.0, 0.0]
        assert divisor == {"token_mean": 5, "seq_mean": 3, "fixed": 24}[aggregate.__name__]


@every_aggregation
def test_nothing_kept_is_nothing_and_not_zero_over_zero(aggregate) -> None:
    for count in (0, 3):
        weights, divisor = aggregate(torch.zeros(count, dtype=torch.bool), torch.arange(count), 8)
        assert weights.tolist() == [0.0] * count
        assert divisor == {"token_mean": 1, "seq_mean": max(1, count), "fixed": max(1, 8 * count)}[aggregate.__name__]


@every_aggregation
@given(tokens=st.lists(st.tuples(st.booleans(), st.integers(0, 4)), min_size=1, max_size=20))
def test_masks_change_the_divisor_of_the_token_mean_alone(aggregate, tokens: list[tuple[bool, int]]) -> None:
    kept, rollout = torch.tensor([t[0] for t in tokens]), torch.tensor([t[1] for t in tokens])
    weights, divisor = aggregate(kept, rollout, 8)
    alone, _ = aggregate(torch.ones(int(kept.sum()), dtype=torch.bool), rollout[kept], 8)
    assert torch.equal(weights[kept], alone)
    _, unmasked = aggregate(torch.ones_like(kept), rollout, 8)
    assert divisor == (max(1, int(kept.sum())) if aggregate is aggregation.token_mean else unmasked)


# ---- corrections ----------------------------------------------------------------------------------------------------

mismatches = st.lists(
    st.lists(st.floats(-0.03, 0.03) | st.floats(-4, 4), min_size=1, max_size=6), min_size=1, max_size=5
)


def scored(rollouts: list[list[float]], dtype: torch.dtype = torch.float64) -> Scored:
    """Rollouts with these log w = log π_old − log μ of their tokens."""
    lengths = [len(r) for r in rollouts]
    difference = torch.tensor([d for r in rollouts for d in r], dtype=dtype)
    behaviour = -torch.arange(1, len(difference) + 1, dtype=dtype).sqrt()
    outcomes, kept = torch.zeros(len(rollouts), dtype=dtype), torch.ones(len(rollouts), dtype=torch.bool)
    return Scored(
        outcomes, [len(rollouts)], torch.tensor(lengths, dtype=torch.int64), kept, behaviour, behaviour + difference
    )


@given(rollouts=mismatches, cap=st.sampled_from([1.0, 2.0, 3.0]))
def test_tis_truncates_every_weight(rollouts: list[list[float]], cap: float) -> None:
    weights, kept = tis.correct(scored(rollouts), cap)
    assert weights.tolist() == pytest.approx([min(math.exp(d), cap) for r in rollouts for d in r], rel=1e-12)
    weights, all_kept = tis.correct(scored(rollouts), cap, level="sequence")
    assert weights.tolist() == pytest.approx([min(math.exp(sum(r)), cap) for r in rollouts for _ in r], rel=1e-12)
    assert kept.all()
    assert all_kept.all()


@given(rollouts=mismatches, band=st.sampled_from([(0.5, 5.0), (0.9, 1.1)]))
def test_icepop_gives_no_weight_outside_the_band_and_drops_nothing(
    rollouts: list[list[float]], band: tuple[float, float]
) -> None:
    ratios = [math.exp(d) for r in rollouts for d in r]
    assume(min(abs(w - edge) for w in ratios for edge in band) > 1e-9)
    weights, kept = icepop.correct(scored(rollouts), *band)
    assert weights.tolist() == pytest.approx([w if band[0] <= w <= band[1] else 0.0 for w in ratios], rel=1e-12)
    assert kept.all()


@given(rollouts=mismatches, band=st.sampled_from([(0.99, 1.01), (0.5, 2.0)]))
def test_seq_mask_drops_whole_rollouts(rollouts: list[list[float]], band: tuple[float, float]) -> None:
    for level, of in (("geometric", lambda r: math.exp(sum(r) / len(r))), ("product", lambda r: math.exp(sum(r)))):
        assume(min(abs(of(r) - edge) for r in rollouts for edge in band) > 1e-9)
        weights, kept = seq_mask.correct(scored(rollouts), *band, level=level)
        assert kept.tolist() == [band[0] <= of(r) <= band[1] for r in rollouts for _ in r]
        assert weights.tolist() == [1.0] * len(kept)


@given(rollouts=mismatches, limit=st.sampled_from([0.01, 1e-4, 0.5]))
def test_k3_mask_drops_whole_rollouts(rollouts: list[list[float]], limit: float) -> None:
    means = [sum(math.exp(d) - 1 - d for d in r) / len(r) for r in rollouts]
    assume(min(abs(m - limit) for m in means) > 1e-9)
    weights, kept = k3_mask.correct(scored(rollouts), limit)
    assert kept.tolist() == [m <= limit for m, r in zip(means, rollouts, strict=True) for _ in r]
    assert weights.tolist() == [1.0] * len(kept)


def test_corrections_at_their_bounds() -> None:
    halves, five = math.log(0.5), math.log(5.0)
    assert icepop.correct(scored([[halves + 1e-12, halves - 1e-9, five - 1e-12, five + 1e-9]]))[
        0
    ].tolist() == pytest.approx([0.5, 0, 5, 0])
    assert seq_mask.correct(scored([[0.009, 0.009], [0.011, 0.011], [-0.01], [-0.011], [0.3, -0.3]]))[1].tolist() == [
        True, True, False, False, True, False, True, True,
    ]  # fmt: skip
    d = 0.141  # k3 = 0.01042; of −0.141: 0.00949
    assert k3_mask.correct(scored([[d], [-d], [d, -d], [0.3, -0.3]]))[1].tolist() == [
        False,
        True,
        True,
        True,
        False,
        False,
    ]


def test_a_product_of_ratios_is_a_trap_for_long_rollouts() -> None:
    for length, product_kept in ((1, True), (50, True), (100, False), (5000, False)):
        batch = scored([[0.0095] * length], torch.float32)
        assert seq_mask.correct(batch)[1].all()  # the geometric mean is e^0.0095 at any length
        assert seq_mask.correct(batch, 0.5, 2.0, level="product")[1].all() == product_kept
    hundred = scored([[0.012] * 100])
    assert tis.correct(hundred, cap=1e9, level="sequence")[0][0].item() == pytest.approx(
        math.exp(1.2), rel=1e-9
    )  # 3.32, over a cap of 3


@every_correction
def test_engines_that_agree_need_no_correction(correct) -> None:
    weights, kept = correct(scored([[0.0] * 3, [0.0]], torch.float32))
    assert weights.tolist() == [1.0] * 4
    assert kept.tolist() == [True] * 4


@every_correction
def test_a_correction_is_of_its_rollout_alone_and_changes_nothing_it_is_given(correct) -> None:
    rollouts = [[0.001, -0.002], [0.4, 0.9, -2.0], [0.008], [3.0]]
    batch = scored(rollouts, torch.float32)
    before = batch.old_logprobs.clone(), batch.behaviour_logprobs.clone()
    weights, kept = correct(batch)
    assert (weights.dtype, kept.dtype, weights.shape, kept.shape) == (torch.float32, torch.bool, (7,), (7,))
    assert torch.equal(batch.old_logprobs, before[0])
    assert torch.equal(batch.behaviour_logprobs, before[1])
    alone = [correct(scored([r], torch.float32)) for r in rollouts]
    torch.testing.assert_close(weights, torch.cat([w for w, _ in alone]), rtol=1e-5, atol=0)
    assert torch.equal(kept, torch.cat([k for _, k in alone]))
    backwards = correct(scored(rollouts[::-1], torch.float32))[1].split([1, 1, 3, 2])
    assert torch.equal(torch.cat(backwards[::-1]), kept)


@every_correction
@pytest.mark.parametrize("old", [-math.inf, -3e38, 0.0])
@pytest.mark.parametrize("behaviour", [-math.inf, -3e38, 0.0])
def test_weights_stay_finite_whatever_happened(correct, old: float, behaviour: float) -> None:
    batch = scored([[0.0, 0.0], [0.0]], torch.float32)
    batch.old_logprobs[1], batch.behaviour_logprobs[1] = old, behaviour
    weights, kept = correct(batch)
    assert weights.isfinite().all()
    assert kept[2]
    apart = (old == 0) != (behaviour == 0)
    if correct in (seq_mask.correct, k3_mask.correct):
        assert kept[:2].tolist() == [not apart] * 2
    if apart and correct is tis.correct:
        assert weights[1].item() == pytest.approx(math.exp(-20) if old else 2.0)
        assert tis.correct(batch, level="sequence")[0][:2].tolist() == pytest.approx(
            [math.exp(-20) if old else 2.0] * 2
        )


def test_a_rollout_with_a_nan_is_dropped_or_shows_it() -> None:
    batch = scored([[0.0, math.nan], [0.0]], torch.float32)
    assert seq_mask.correct(batch)[1].tolist() == [False, False, True]
    assert k3_mask.correct(batch)[1].tolist() == [False, False, True]
    assert tis.correct(batch)[0].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("correct", [tis.correct, seq_mask.correct])
def test_an_unknown_level_is_an_error(correct) -> None:
    with pytest.raises(ValueError, match="level='tokens'"):
        correct(scored([[0.0]]), level="tokens")


def test_every_correction_file_names_its_part_with_its_defaults() -> None:
    merged = OmegaConf.create({})
    for name, correct in zip(("tis", "icepop", "seq_mask", "k3_mask"), CORRECTIONS, strict=True):
        text = (CONF / f"correction/{name}.yaml").read_text()
        assert text.startswith("# ")
        merged = OmegaConf.merge(merged, OmegaConf.create(text))  # any of them can be chosen together
        defaults = {k: p.default for k, p in inspect.signature(correct).parameters.items() if k != "batch"}
        assert OmegaConf.to_container(merged[name]) == {"_target_": f"hybrid_rl.algo.{name}.correct", **defaults}
        assert instantiate(merged[name], _partial_=True)(scored([[0.0]]))[1].tolist() == [True]
    assert set(merged) == {path.stem for path in CONF.glob("correction/*.yaml")}


def test_every_aggregation_file_names_a_function_that_is_there() -> None:
    texts = {path.stem: path.read_text() for path in CONF.glob("aggregation/*.yaml")}
    assert texts.keys() == {f.__name__ for f in AGGREGATIONS}
    for name, text in texts.items():
        assert text.startswith("# ")
        assert get_method(OmegaConf.create(text)["_target_"]) is getattr(aggregation, name)


# ---- quantiles of ratios ----------------------------------------------------------------------------------------------


def test_quantiles_of_a_ratio_are_those_of_its_logarithm() -> None:
    log_ratios = torch.linspace(-1, 1, 201)[torch.randperm(201, generator=torch.Generator().manual_seed(0))]
    expected = {"p01": math.exp(-0.98), "p50": 1.0, "p99": math.exp(0.98), "max": math.e}
    found = ratio.quantiles(log_ratios)
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, rel=1e-6)


@given(values=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=50))
def test_quantiles_are_of_the_tokens_themselves(values: list[float]) -> None:
    found = ratio.quantiles(torch.tensor(values))
    ratios = sorted(map(math.exp, values))
    for name, share in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        below, above = (
            sum(r < found[name] * (1 - 1e-9) for r in ratios),
            sum(r > found[name] * (1 + 1e-9) for r in ratios),
        )
        assert any(found[name] == pytest.approx(r, rel=1e-12) for r in ratios)
        assert below <= share * (len(ratios) - 1) + 0.5
        assert above <= (1 - share) * (len(ratios) - 1) + 0.5


def test_quantiles_are_raw_and_of_no_tokens_none() -> None:
    assert ratio.quantiles(torch.zeros(0)) == {}
    assert ratio.quantiles(torch.tensor([50.0, -math.inf, 0.0])) == pytest.approx(
        {"p01": 0.0, "p50": 1.0, "p99": math.exp(50), "max": math.exp(50)}
    )
    assert math.isnan(ratio.quantiles(torch.tensor([0.0, math.nan, 1.0]))["max"])


# ---- overlong ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20479, -4095 / 4096), (20480, -1.0), (20481, -1.0), (10**6, -1.0)]
)  # fmt: skip
def test_overlong_penalty_of_the_paper(length: int, expected: float) -> None:
    assert overlong.penalty(length, max_tokens=20480, buffer=4096) == expected


def test_overlong_penalty_without_a_buffer_is_a_step() -> None:
    assert [overlong.penalty(n, max_tokens=10, buffer=0) for n in (0, 9, 10, 11)] == [0.0, 0.0, 0.0, -1.0]


@given(max_tokens=st.integers(1, 100), share=st.floats(0, 1))
def test_overlong_penalty_falls_steadily(max_tokens: int, share: float) -> None:
    values = [overlong.penalty(n, max_tokens, int(share * max_tokens)) for n in range(max_tokens + 3)]
    assert values == sorted(values, reverse=True)
    assert (values[0], values[-1]) == (0.0, -1.0)
