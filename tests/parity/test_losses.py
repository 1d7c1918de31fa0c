"""verl's, TRL's and SkyRL's published formulas, written out anew over padded [B, T] float64, against ours; and where
ours differs."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from hybrid_rl.algo import (
    aggregation,
    cispo,
    dppo_tv,
    gspo,
    icepop,
    k3_mask,
    kl,
    overlong,
    ppo_clip,
    sapo,
    seq_mask,
    tis,
)
from hybrid_rl.algo.batch import Scored, Tokens

LENGTHS = [7, 1, 4, 12, 3, 9]
MASK = torch.arange(12)[None, :] < torch.tensor(LENGTHS)[:, None]
MAX_TOKENS = 16


@pytest.fixture(params=[0.05, 0.5, 1.5], ids=lambda s: f"spread{s}")
def padded(request) -> dict[str, Tensor]:
    """new, old, behaviour, advantages [B, T]: a rollout's advantage is one number; padding holds garbage, as it may."""
    torch.manual_seed(0)
    old = -5 * torch.rand(6, 12, dtype=torch.float64)
    new = old + request.param * torch.randn(6, 12, dtype=torch.float64)
    behaviour = old + 0.5 * request.param * torch.randn(6, 12, dtype=torch.float64)
    return {
        "new": new,
        "old": old,
        "behaviour": behaviour,
        "advantages": torch.randn(6, 1, dtype=torch.float64).expand(6, 12).contiguous(),
    }


def ours(
    p: dict[str, Tensor], loss: Callable, aggregate: Callable, kept: Tensor | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss of the batch, its gradient [B, T], and the statistics [B, T]."""
    new = p["new"].clone().requires_grad_()
    rollout = torch.arange(6).repeat_interleave(torch.tensor(LENGTHS))
    losses, statistics = loss(
        Tokens(new[MASK], p["old"][MASK], p["behaviour"][MASK], p["advantages"][MASK], rollout, new[MASK].detach())
    )
    weights, divisor = aggregate(
        torch.ones(len(rollout), dtype=torch.bool) if kept is None else kept[rollout], rollout, MAX_TOKENS
    )
    weights = weights.double()
    if aggregate is aggregation.seq_mean:  # float32 thirds would be the only difference
        weights = (weights > 0) / torch.tensor(LENGTHS, dtype=torch.float64)[rollout]
    value = (weights * losses).sum() / divisor
    (slope,) = torch.autograd.grad(value, new)
    spread = {
        name: torch.zeros(6, 12, dtype=torch.bool).masked_scatter(MASK, column) for name, column in statistics.items()
    }
    return value.detach(), slope, spread


def theirs(p: dict[str, Tensor], formula: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    new = p["new"].clone().requires_grad_()
    value = formula(new, p["old"], p["behaviour"], p["advantages"])
    (slope,) = torch.autograd.grad(value, new)
    return value.detach(), slope


def same(found: tuple, expected: tuple, tolerance: float = 1e-12) -> bool:
    return all(torch.allclose(a, b, rtol=tolerance, atol=1e-13) for a, b in zip(found[:2], expected, strict=True))


# ---- aggregation, as they have it -------------------------------------------------------------------------------------


def masked_mean(column: Tensor) -> Tensor:  # verl token-mean, TRL dapo over one process
    return (column * MASK).sum() / MASK.sum()


def seq_mean_token_mean(column: Tensor) -> Tensor:  # verl; TRL grpo
    return ((column * MASK).sum(-1) / MASK.sum(-1)).mean()


def dr_grpo(column: Tensor) -> Tensor:  # TRL dr_grpo; verl seq-mean-token-sum-norm with the horizon as its scale
    return (column * MASK).sum() / (column.size(0) * MAX_TOKENS)


@pytest.mark.parametrize(
    ("aggregate", "reference"),
    [(aggregation.token_mean, masked_mean), (aggregation.seq_mean, seq_mean_token_mean), (aggregation.fixed, dr_grpo)],
)
def test_aggregation(padded, aggregate, reference) -> None:
    def formula(new, old, behaviour, advantages):
        ratio = (new - old).exp()
        return reference(-torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages))

    assert same(ours(padded, partial(ppo_clip.loss, dual_clip=None), aggregate), theirs(padded, formula))


def test_a_fully_masked_rollout_counts_as_in_trl(padded) -> None:
    kept = torch.tensor([True, True, False, True, True, True])

    def trl(new, old, behaviour, advantages):
        mask = MASK & kept[:, None]
        ratio = (new - old).exp()
        column = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * mask
        return torch.stack([(column.sum(-1) / mask.sum(-1).clamp(min=1)).mean(), column.sum() / (6 * MAX_TOKENS)])

    for place, aggregate in enumerate((aggregation.seq_mean, aggregation.fixed)):
        found = ours(padded, partial(ppo_clip.loss, dual_clip=None), aggregate, kept)
        assert same(found, theirs(padded, lambda *columns, place=place: trl(*columns)[place]))


# ---- losses -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("high", [0.2, 0.28])
def test_verl_vanilla_with_dual_clip(padded, high: float) -> None:
    def columns(new, old, advantages):
        ratio = (new - old).clamp(-20, 20).exp()
        one, two = -advantages * ratio, -advantages * ratio.clamp(1 - 0.2, 1 + high)
        first, third = torch.maximum(one, two), -advantages * 3.0
        return one, two, first, third

    def formula(new, old, behaviour, advantages):
        _, _, first, third = columns(new, old, advantages)
        return masked_mean(torch.where(advantages < 0, torch.min(third, first), first))

    value, slope, statistics = ours(padded, partial(ppo_clip.loss, clip_high=high), aggregation.token_mean)
    assert same((value, slope), theirs(padded, formula))
    one, two, first, third = columns(padded["new"], padded["old"], padded["advantages"])
    assert torch.equal(statistics["clip_low"] | statistics["clip_high"], (two > one) & MASK)  # pg_clipfrac
    assert torch.equal(
        statistics["clip_dual"], (first > third) & (padded["advantages"] < 0) & MASK
    )  # pg_clipfrac_lower


def test_dual_clip_is_on_as_in_verl_unless_told_otherwise(padded) -> None:
    def formula(new, old, behaviour, advantages):
        ratio = (new - old).exp()
        first = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        return masked_mean(torch.where(advantages < 0, torch.min(-advantages * 3.0, first), first))

    over = ((padded["new"] - padded["old"]).exp() > 3) & (padded["advantages"] < 0) & MASK
    assert same(ours(padded, ppo_clip.loss, aggregation.token_mean), theirs(padded, formula))
    off = ours(padded, partial(ppo_clip.loss, dual_clip=None), aggregation.token_mean)
    assert same(off, theirs(padded, formula)) == (not over.any())


def gspo_token_form(new, old, behaviour, advantages) -> Tensor:  # verl: sg[s] · π / sg[π], log at most 10
    mean = ((new - old) * MASK).sum(-1) / MASK.sum(-1)
    ratio = (new - new.detach() + mean.detach()[:, None]).clamp(max=10.0).exp()
    return seq_mean_token_mean(torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - 3e-4, 1 + 4e-4)))


def gspo_sequence_form(new, old, behaviour, advantages) -> Tensor:  # TRL: one loss a rollout
    ratio = (((new - old) * MASK).sum(-1) / MASK.sum(-1).clamp(min=1)).exp()
    return -torch.min(ratio * advantages[:, 0], ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantages[:, 0]).mean()


@pytest.mark.parametrize("formula", [gspo_token_form, gspo_sequence_form])
def test_gspo_of_verl_and_trl(padded, formula) -> None:
    value, slope, statistics = ours(padded, gspo.loss, aggregation.seq_mean)
    assert same((value, slope), theirs(padded, formula), 1e-10)
    silenced = (statistics["clip_low"] | statistics["clip_high"]).any(-1)
    assert silenced.any()
    assert not silenced.all()
    assert torch.equal(slope.abs().sum(-1) > 0, ~silenced)


def test_gspo_with_an_advantage_a_token_averages_and_verl_does_not(padded) -> None:
    torch.manual_seed(2)
    p = padded | {"old": padded["new"].clone(), "advantages": torch.randn(6, 12, dtype=torch.float64)}
    _, slope, _ = ours(p, gspo.loss, aggregation.seq_mean)
    _, verl = theirs(p, gspo_token_form)
    assert not torch.allclose(slope, verl)
    mean = ((verl * MASK).sum(-1) / MASK.sum(-1))[:, None] * MASK  # the same in sum; each token gets its rollout's mean
    torch.testing.assert_close(slope, mean)


@pytest.mark.parametrize(
    ("bounds", "clip"),
    [
        ((0.2, 0.2), lambda ratio: ratio.clamp(1 - 0.2, 1 + 0.2)),  # verl's default
        ((1.0, 4.0), lambda ratio: ratio.clamp(1 - 1.0, 1 + 4.0)),  # SkyRL's default, and ours
        ((1.0, 4.0), lambda ratio: ratio.clamp(max=5.0)),  # TRL with epsilon_high = 5.0: the bound itself, none below
    ],
    ids=["verl", "skyrl", "trl"],
)
def test_cispo(padded, bounds, clip) -> None:
    def formula(new, old, behaviour, advantages):
        return masked_mean(-clip((new - old).exp()).detach() * advantages * new)

    assert same(
        ours(padded, partial(cispo.loss, clip_low=bounds[0], clip_high=bounds[1]), aggregation.token_mean),
        theirs(padded, formula),
    )
    if bounds == (1.0, 4.0):
        assert same(ours(padded, cispo.loss, aggregation.token_mean), theirs(padded, formula))


def test_trls_epsilon_high_is_not_our_clip_high(padded) -> None:
    def trl(new, old, behaviour, advantages):
        return masked_mean(-(new - old).exp().clamp(max=0.28).detach() * advantages * new)

    assert not same(ours(padded, partial(cispo.loss, clip_high=0.28), aggregation.token_mean), theirs(padded, trl))
    assert same(ours(padded, partial(cispo.loss, clip_high=0.28 - 1), aggregation.token_mean), theirs(padded, trl))


def test_sapo_of_verl_and_trl(padded) -> None:
    def formula(new, old, behaviour, advantages):
        tau = torch.where(advantages > 0, torch.tensor(1.0).double(), torch.tensor(1.05, dtype=torch.float64))
        gate = torch.sigmoid(tau * ((new - old).clamp(-20, 20).exp() - 1.0)) * (4.0 / tau)
        return seq_mean_token_mean(-gate * advantages)

    assert same(ours(padded, sapo.loss, aggregation.seq_mean), theirs(padded, formula))


def dppo_verl(
    new, old, advantages, anchor
) -> Tensor:  # −sg(min(ρ, 3)) · A · log π on kept tokens: its clip_ratio_c bounds ρ here
    moved = new.exp() - anchor.exp()
    valid = torch.where(advantages > 0, moved <= 0.2, moved >= -0.2).detach()
    return masked_mean(-advantages * (new - old).clamp(-20, 20).exp().clamp(max=3.0).detach() * new * valid)


def test_dppo_of_verl_where_old_is_what_was_sampled_with(padded) -> None:
    p = padded | {"behaviour": padded["old"]}
    _, slope, statistics = ours(p, dppo_tv.loss, aggregation.token_mean)
    _, expected = theirs(p, lambda new, old, behaviour, advantages: dppo_verl(new, old, advantages, old))
    over = ((p["new"] - p["old"]).exp() > 3) & MASK
    assert torch.allclose(slope[~over], expected[~over], rtol=1e-12, atol=1e-15)
    assert (slope[over].abs() >= expected[over].abs()).all()
    assert (slope[statistics["clip_low"] | statistics["clip_high"]] == 0).all()


def test_dppo_measures_from_the_engine_and_verl_from_old(padded) -> None:
    _, slope, _ = ours(padded, dppo_tv.loss, aggregation.token_mean)
    from_engine = theirs(padded, lambda new, old, behaviour, advantages: dppo_verl(new, old, advantages, behaviour))[1]
    from_old = theirs(padded, lambda new, old, behaviour, advantages: dppo_verl(new, old, advantages, old))[1]
    within = (padded["new"] - padded["old"]).exp() <= 3
    assert torch.allclose(slope[within], from_engine[within], rtol=1e-12, atol=1e-15)
    differ = not torch.allclose(from_engine, from_old)
    assert torch.allclose(slope[within], from_old[within]) == (not differ)


def test_dppo_of_prime_rl(padded) -> None:
    """−A·ρ with ρ and the mask to the engine's probabilities, and kl_tau · (log ρ)² on every token."""
    p = padded | {"old": padded["behaviour"]}

    def formula(new, old, behaviour, advantages):
        moved = (new.exp() - behaviour.exp()).detach()
        masked = torch.where(advantages > 0, moved > 0.2, moved < -0.2)
        return masked_mean(-advantages * (new - behaviour).exp() * ~masked + 1e-3 * (new - behaviour) ** 2)

    assert same(ours(p, partial(dppo_tv.loss, kl_tau=1e-3), aggregation.token_mean), theirs(p, formula))


# ---- corrections --------------------------------------------------------------------------------------------------------


def scored(p: dict[str, Tensor]) -> Scored:
    outcomes = torch.zeros(6, dtype=torch.float64)
    return Scored(
        outcomes, [6], torch.tensor(LENGTHS), torch.ones(6, dtype=torch.bool), p["behaviour"][MASK], p["old"][MASK]
    )


@pytest.fixture
def log_w(padded) -> np.ndarray:
    return np.where(MASK.numpy(), (padded["old"] - padded["behaviour"]).numpy(), 0.0)


def flat(column: np.ndarray) -> np.ndarray:
    return np.broadcast_to(column, (6, 12))[MASK.numpy()]


def test_tis_of_verl_and_trl(padded, log_w) -> None:
    for cap in (2.0, 3.0):  # verl's and TRL's
        token, sequence = np.exp(np.clip(log_w, -20, 20)), np.exp(np.clip(log_w.sum(-1, keepdims=True), -20, 20))
        np.testing.assert_allclose(
            tis.correct(scored(padded), cap)[0].numpy(), flat(np.minimum(token, cap)), rtol=1e-12
        )
        np.testing.assert_allclose(
            tis.correct(scored(padded), cap, level="sequence")[0].numpy(), flat(np.minimum(sequence, cap)), rtol=1e-12
        )


def test_icepop_of_verl(padded, log_w) -> None:
    w = np.exp(log_w)
    weights, kept = icepop.correct(scored(padded))
    np.testing.assert_allclose(weights.numpy(), flat(np.where((w >= 0.5) & (w <= 5.0), w, 0.0)), rtol=1e-12)
    assert kept.all()  # verl, too, leaves the response mask as it is


def test_rejection_of_whole_rollouts_of_verl_and_skyrl(padded, log_w) -> None:
    lengths = np.array(LENGTHS)[:, None]
    geometric = np.exp(log_w.sum(-1, keepdims=True) / lengths)
    product = np.exp(log_w.sum(-1, keepdims=True))
    k3 = (np.where(MASK.numpy(), np.exp(log_w) - 1 - log_w, 0).sum(-1, keepdims=True)) / lengths
    batch = scored(padded)
    assert (seq_mask.correct(batch)[1].numpy() == flat((geometric >= 0.99) & (geometric <= 1.01))).all()
    assert (
        seq_mask.correct(batch, 0.5, 2.0, level="product")[1].numpy() == flat((product >= 0.5) & (product <= 2.0))
    ).all()
    assert (k3_mask.correct(batch)[1].numpy() == flat(k3 <= 0.01)).all()


def test_trls_sequence_mask_is_a_weight_of_zero_above_the_cap_and_ours_leaves_the_count(padded, log_w) -> None:
    product = np.exp(log_w.sum(-1, keepdims=True))
    trl = np.where(
        product > 3.0, 0.0, product
    )  # a weight; its tokens stay in the denominator, and there is no lower bound
    weights, kept = seq_mask.correct(scored(padded), 0.0, 3.0, level="product")
    assert (kept.numpy() == (flat(trl) > 0)).all()
    product_weights, _ = tis.correct(scored(padded), cap=math.inf, level="sequence")
    np.testing.assert_allclose((product_weights * weights * kept).numpy(), flat(trl), rtol=1e-12)
    rollout = torch.arange(6).repeat_interleave(torch.tensor(LENGTHS))
    _, divisor = aggregation.token_mean(kept, rollout, MAX_TOKENS)
    assert divisor == kept.sum()
    assert (divisor == len(kept)) == bool((product <= 3.0).all())


# ---- KL and the overlong penalty ----------------------------------------------------------------------------------------


def test_kl_penalties_of_verl() -> None:
    logprobs, reference = -8 * torch.rand(2, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(kl.k1(logprobs, reference), logprobs - reference)
    torch.testing.assert_close(kl.k2(logprobs, reference), 0.5 * (logprobs - reference) ** 2)
    d = (reference - logprobs).clamp(-20, 20)
    uncut = d.exp() - d - 1
    verl = uncut.clamp(-10, 10)
    torch.testing.assert_close(kl.k3(logprobs, reference), uncut, rtol=1e-10, atol=1e-12)
    assert verl[uncut > 10].tolist() == [10.0] * int((uncut > 10).sum())
    assert (
        kl.k3(logprobs, reference)[uncut > 10] > 10
    ).all()  # verl bounds the value at 10, and there the gradient ends; we do not
    assert 0 < (uncut > 10).sum() < 200


def test_adaptive_coefficient_of_verl_and_ziegler() -> None:
    for measured in (0.01, 5.9, 6.0, 6.3, 100.0):
        mult = 1 + float(np.clip(measured / 6.0 - 1, -0.2, 0.2)) * 1 / 100
        assert kl.adapted(0.2, measured, target=6.0, horizon=100) == pytest.approx(0.2 * mult, rel=1e-14)
        ziegler = 0.2 * (1 + 0.1 * float(np.clip((measured - 6.0) / 6.0, -0.2, 0.2)))  # K_β = 0.1
        assert kl.adapted(0.2, measured, target=6.0, horizon=10) == pytest.approx(ziegler, rel=1e-12)


@pytest.mark.parametrize("buffer", [1, 128, 4096])
def test_overlong_penalty_of_dapo(buffer: int) -> None:
    for length in range(0, 8193, 37):
        verl = min(-(length - (8192 - buffer)) / buffer * 1.0, 0)  # its DAPO reward manager, penalty factor 1
        assert overlong.penalty(length, 8192, buffer) == pytest.approx(verl, abs=1e-12)
