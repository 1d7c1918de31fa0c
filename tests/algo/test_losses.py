"""Every loss against plain Python float64, a derivative by hand, and autograd of its formula."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rl.algo import cispo, clip_cov, dppo_tv, gmpo, gspo, kl_cov, ppo_clip, sapo
from hybrid_rl.algo.batch import Tokens
from tests.algo.losses import LOSSES, Token, batch, gradient, rollouts

# ---- by hand: value, derivative by log π_θ, clip_low, clip_high -------------------------------------------------------


def ppo_by_hand(token: Token, low: float = 0.2, high: float = 0.2, c: float = 3.0) -> tuple[float, float, bool, bool]:
    new, old, _, a = token
    ratio = math.exp(new - old)
    if a > 0 and ratio > 1 + high:
        return -(1 + high) * a, 0.0, False, True
    if a < 0 and ratio < 1 - low:
        return -(1 - low) * a, 0.0, True, False
    if a < 0 and ratio > c:
        return -c * a, 0.0, False, False
    return -ratio * a, -ratio * a, False, False


def cispo_by_hand(token: Token, low: float = 1.0, high: float = 4.0) -> tuple[float, float, bool, bool]:
    new, old, _, a = token
    ratio = math.exp(new - old)
    weight = 1 - low if ratio < 1 - low else 1 + high if ratio > 1 + high else ratio
    return -weight * a * new, -weight * a, ratio < 1 - low, ratio > 1 + high


def dppo_by_hand(token: Token) -> tuple[float, float, bool, bool]:
    new, old, behaviour, a = token
    moved = math.exp(new) - math.exp(behaviour)
    if a > 0 and moved > 0.2:
        return 0.0, 0.0, False, True
    if a <= 0 and moved < -0.2:
        return 0.0, 0.0, True, False
    return -math.exp(new - old) * a, -math.exp(new - old) * a, False, False


def sapo_by_hand(token: Token) -> tuple[float, float, bool, bool]:
    new, old, _, a = token
    ratio, tau = math.exp(new - old), 1.0 if a > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -4 / tau * gate * a, -4 * gate * (1 - gate) * ratio * a, False, False


def reinforce_by_hand(token: Token) -> tuple[float, float, bool, bool]:
    return -token[3] * token[0], -token[3], False, False


BY_HAND = {
    "ppo_clip": ppo_by_hand,
    "clip_higher": partial(ppo_by_hand, high=0.28),
    "without_dual_clip": partial(ppo_by_hand, c=math.inf),
    "cispo": cispo_by_hand,
    "cispo_narrow": partial(cispo_by_hand, low=0.2, high=0.28),
    "dppo_tv": dppo_by_hand,
    "sapo": sapo_by_hand,
    "reinforce": reinforce_by_hand,
}


def clear(token: Token) -> bool:
    """Away from every edge, where one rounding decides."""
    new, old, behaviour, _ = token
    ratio, moved = math.exp(new - old), math.exp(new) - math.exp(behaviour)
    return min(abs(ratio - edge) for edge in (0.8, 1.2, 1.28, 3, 5)) > 1e-9 and abs(abs(moved) - 0.2) > 1e-9


@pytest.mark.parametrize("name", BY_HAND)
@given(given_rollouts=rollouts)
def test_loss_is_the_formula_by_hand(name: str, given_rollouts: list[list[Token]]) -> None:
    facts = [t for r in given_rollouts for t in r]
    assume(all(map(clear, facts)))
    tokens = batch(given_rollouts)
    losses, statistics = LOSSES[name](tokens)
    expected = [BY_HAND[name](t) for t in facts]
    assert losses.tolist() == pytest.approx([e[0] for e in expected], rel=1e-12, abs=1e-12)
    assert gradient(losses, tokens).tolist() == pytest.approx([e[1] for e in expected], rel=1e-12, abs=1e-12)
    assert statistics["clip_low"].tolist() == [e[2] for e in expected]
    assert statistics["clip_high"].tolist() == [e[3] for e in expected]


@pytest.mark.parametrize("bounds", [(3e-4, 4e-4), (0.2, 0.28)])
@given(given_rollouts=rollouts)
def test_gspo_is_the_formula_by_hand(bounds: tuple[float, float], given_rollouts: list[list[Token]]) -> None:
    low, high = bounds
    values, derivatives, lows, highs = [], [], [], []
    for rollout in given_rollouts:
        ratio = math.exp(sum(new - old for new, old, _, _ in rollout) / len(rollout))
        assume(min(abs(ratio - 1 + low), abs(ratio - 1 - high)) > 1e-9)
        silenced = [(a < 0 and ratio < 1 - low, a > 0 and ratio > 1 + high) for *_, a in rollout]
        values += [
            -(1 - low if s[0] else 1 + high if s[1] else ratio) * t[3] for t, s in zip(rollout, silenced, strict=True)
        ]
        heard = sum(t[3] for t, s in zip(rollout, silenced, strict=True) if not any(s))
        derivatives += [-ratio * heard / len(rollout)] * len(
            rollout
        )  # each token moves the mean, and so every loss of its rollout
        lows += [s[0] for s in silenced]
        highs += [s[1] for s in silenced]
    tokens = batch(given_rollouts)
    losses, statistics = gspo.loss(tokens, low, high)
    assert losses.tolist() == pytest.approx(values, rel=1e-11, abs=1e-12)
    assert gradient(losses, tokens).tolist() == pytest.approx(derivatives, rel=1e-11, abs=1e-11)
    assert (statistics["clip_low"].tolist(), statistics["clip_high"].tolist()) == (lows, highs)


@given(given_rollouts=rollouts, bounds=st.sampled_from([(0.4, 0.4), (0.1, 0.2)]))
def test_gmpo_is_the_formula_by_hand(bounds: tuple[float, float], given_rollouts: list[list[Token]]) -> None:
    """One advantage a rollout, as the paper has it; the geometric mean of its clipped ratios, multiplied out."""
    low, high = bounds
    given_rollouts = [[(*t[:3], r[0][3]) for t in r] for r in given_rollouts]
    values, derivatives, lows, highs = [], [], [], []
    for rollout in given_rollouts:
        a = rollout[0][3]
        ratios = [math.exp(new - old) for new, old, _, _ in rollout]
        assume(all(min(abs(math.log(r) - high), abs(math.log(r) + low)) > 1e-9 for r in ratios))
        clipped = [min(r, math.exp(high)) if a > 0 else max(r, math.exp(-low)) if a < 0 else r for r in ratios]
        mean = math.prod(clipped) ** (1 / len(rollout))
        silenced = [(a < 0 and r < math.exp(-low), a > 0 and r > math.exp(high)) for r in ratios]
        values += [-a * mean] * len(rollout)
        derivatives += [
            0.0 if any(s) else -a * mean for s in silenced
        ]  # of the rollout's tokens together: n equal losses, each 1/n of it
        lows += [s[0] for s in silenced]
        highs += [s[1] for s in silenced]
    tokens = batch(given_rollouts)
    losses, statistics = gmpo.loss(tokens, low, high)
    assert losses.tolist() == pytest.approx(values, rel=1e-11, abs=1e-12)
    assert gradient(losses, tokens).tolist() == pytest.approx(derivatives, rel=1e-10, abs=1e-11)
    assert (statistics["clip_low"].tolist(), statistics["clip_high"].tolist()) == (lows, highs)


@given(given_rollouts=rollouts)
def test_kl_cov_prices_the_move_of_the_tokens_that_its_look_named(given_rollouts: list[list[Token]]) -> None:
    facts = [t for r in given_rollouts for t in r]
    assume(all(abs(new - old) > 1e-6 for new, old, _, _ in facts))
    tokens = batch(given_rollouts)
    losses, statistics = kl_cov.loss(tokens, coef=0.5)
    looked = tokens.look.tolist()
    values = [
        -math.exp(new - old) * a + 0.5 * seen * abs(new - old)
        for (new, old, _, a), seen in zip(facts, looked, strict=True)
    ]
    slopes = [
        -math.exp(new - old) * a + 0.5 * seen * math.copysign(1, new - old)
        for (new, old, _, a), seen in zip(facts, looked, strict=True)
    ]
    assert losses.tolist() == pytest.approx(values, rel=1e-11, abs=1e-12)
    assert gradient(losses, tokens).tolist() == pytest.approx(slopes, rel=1e-11, abs=1e-12)
    assert statistics["covariant"].tolist() == looked
    assert not (statistics["clip_low"] | statistics["clip_high"]).any()


@given(given_rollouts=rollouts)
def test_clip_cov_silences_the_tokens_that_its_look_named(given_rollouts: list[list[Token]]) -> None:
    assume(all(map(clear, (t for r in given_rollouts for t in r))))
    tokens = batch(given_rollouts)
    plain, _ = ppo_clip.loss(tokens, dual_clip=None)
    losses, _ = clip_cov.loss(tokens)
    assert torch.equal(losses, plain.masked_fill(tokens.look, 0.0))
    assert torch.equal(gradient(losses, tokens), gradient(plain, tokens).masked_fill(tokens.look, 0.0))


@given(given_rollouts=rollouts)
def test_dppos_pull_towards_the_engine_is_added_to_every_token(given_rollouts: list[list[Token]]) -> None:
    assume(all(map(clear, (t for r in given_rollouts for t in r))))
    tokens = batch(given_rollouts)
    apart = [new - mu for r in given_rollouts for new, _, mu, _ in r]
    plain, pulled = dppo_tv.loss(tokens)[0], dppo_tv.loss(tokens, kl_tau=0.01)[0]
    assert (pulled - plain).tolist() == pytest.approx([0.01 * d * d for d in apart], rel=1e-9, abs=1e-12)
    pull = gradient(pulled, tokens) - gradient(plain, tokens)
    assert pull.tolist() == pytest.approx([0.02 * d for d in apart], rel=1e-9, abs=1e-12)


# ---- against autograd of the textbook's line ----------------------------------------------------------------------------

TEXTBOOK: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "without_dual_clip": lambda new, old, mu, a: -torch.min((new - old).exp() * a, (new - old).exp().clip(0.8, 1.2) * a),
    "clip_higher": lambda new, old, mu, a: torch.where(
        a < 0,
        torch.min(-3.0 * a, -torch.min((new - old).exp() * a, (new - old).exp().clip(0.8, 1.28) * a)),
        -torch.min((new - old).exp() * a, (new - old).exp().clip(0.8, 1.28) * a),
    ),
    "ppo_clip": lambda new, old, mu, a: torch.where(
        a < 0,
        torch.min(-3.0 * a, -torch.min((new - old).exp() * a, (new - old).exp().clip(0.8, 1.2) * a)),
        -torch.min((new - old).exp() * a, (new - old).exp().clip(0.8, 1.2) * a),
    ),
    "cispo": lambda new, old, mu, a: -(new - old).exp().clip(max=5.0).detach() * a * new,
    "dppo_tv": lambda new, old, mu, a: (
        -(new.exp() / old.exp()) * a * ~(((a > 0) & (new.exp() - mu.exp() > 0.2)) | ((a <= 0) & (new.exp() - mu.exp() < -0.2)))
    ),
    "sapo": lambda new, old, mu, a: -torch.where(
        a > 0, 4 * torch.sigmoid((new - old).exp() - 1), 4 / 1.05 * torch.sigmoid(1.05 * ((new - old).exp() - 1))
    ) * a,
    "reinforce": lambda new, old, mu, a: -a * new,
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTBOOK)
@given(given_rollouts=rollouts)
def test_loss_is_autograd_of_the_textbook(name: str, given_rollouts: list[list[Token]]) -> None:
    assume(all(clear(t) for r in given_rollouts for t in r))
    tokens = batch(given_rollouts)
    losses, _ = LOSSES[name](tokens)
    expected = TEXTBOOK[name](tokens.logprobs, tokens.old_logprobs, tokens.behaviour_logprobs, tokens.advantages)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(losses, tokens), gradient(expected, tokens), rtol=1e-12, atol=1e-12)


# ---- numbers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "cut"),
    [
        (1.5, 2.0, -2.4, "clip_high"), (1.5, -2.0, 3.0, ""), (0.5, 2.0, -1.0, ""), (0.5, -2.0, 1.6, "clip_low"),
        (1.1, 2.0, -2.2, ""), (0.9, -2.0, 1.8, ""), (1.5, 0.0, 0.0, ""), (0.5, 0.0, 0.0, ""), (9.0, -2.0, 18.0, ""),
    ],
)  # fmt: skip
def test_ppo_clip_silences_only_a_move_that_already_went_far_the_right_way(ratio, advantage, loss, cut) -> None:
    tokens = batch([[(math.log(ratio), 0.0, 0.0, advantage)]])
    losses, statistics = ppo_clip.loss(tokens, dual_clip=0)
    assert losses.item() == pytest.approx(loss, rel=1e-12)
    assert [name for name, column in statistics.items() if column.item()] == ([cut] if cut else [])
    assert gradient(losses, tokens).item() == pytest.approx(0.0 if cut else -ratio * advantage, rel=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "cut"),
    [
        (9.0, -2.0, 6.0, "clip_dual"), (2.9, -2.0, 5.8, ""), (9.0, 2.0, -2.4, "clip_high"), (0.5, -2.0, 1.6, "clip_low"),
        (9.0, 0.0, 0.0, ""),
    ],
)  # fmt: skip
def test_dual_clip_bounds_what_a_token_with_a_negative_advantage_may_cost(ratio, advantage, loss, cut) -> None:
    tokens = batch([[(math.log(ratio), 0.0, 0.0, advantage)]])
    losses, statistics = ppo_clip.loss(tokens)
    assert losses.item() == pytest.approx(loss, rel=1e-12)
    assert [name for name, column in statistics.items() if column.item()] == ([cut] if cut else [])
    assert gradient(losses, tokens).item() == pytest.approx(0.0 if cut else -ratio * advantage, rel=1e-12)
    for off in (0, None):
        assert "clip_dual" not in ppo_clip.loss(tokens, dual_clip=off)[1]


def test_ppo_clip_keeps_its_arithmetic_to_the_bit() -> None:
    torch.manual_seed(0)
    old, advantages = -5 * torch.rand(4096), torch.randn(4096)
    new = (old + 0.3 * torch.randn(4096)).requires_grad_()
    ratio = (new - old).clamp(-20.0, 20.0).exp()
    free, clipped = ratio * advantages, ratio.clamp(1 - 0.2, 1 + 0.28) * advantages
    expected = -torch.minimum(free, clipped)
    tokens = Tokens(new, old, old, advantages, torch.arange(4096), old)
    losses, statistics = ppo_clip.loss(tokens, 0.2, 0.28, dual_clip=0)
    assert torch.equal(losses, expected)
    assert torch.equal(gradient(losses, tokens), gradient(expected, tokens))
    assert torch.equal(statistics["clip_low"] | statistics["clip_high"], clipped < free)
    assert 0 < statistics["clip_low"].sum() < 4096 > statistics["clip_high"].sum() > 0


def test_gspo_has_one_ratio_a_rollout() -> None:
    # mean log ρ: 0.0003 within the band, 0.0005 above it, −0.0005 below it
    tokens = batch(
        [
            [(-1.0, -1.2, 0, 1.0), (-1.0, -0.8006, 0, 1.0)],
            [(-1.0, -1.001, 0, 1.0), (-2.0, -2.0, 0, 1.0)],
            [(-1.0, -0.9995, 0, -1.0)],
        ]
    )
    losses, statistics = gspo.loss(tokens)
    assert losses.tolist() == pytest.approx([-math.exp(3e-4)] * 2 + [-1.0004] * 2 + [0.9997], rel=1e-12)
    assert gradient(losses, tokens).tolist() == pytest.approx([-math.exp(3e-4)] * 2 + [0.0] * 3, rel=1e-12)
    assert statistics["clip_high"].tolist() == [False, False, True, True, False]
    assert statistics["clip_low"].tolist() == [False, False, False, False, True]


def test_cispo_cuts_the_weight_and_keeps_the_gradient() -> None:
    tokens = batch(
        [[(-1.0, -1 - math.log(r), 0.0, a) for r, a in [(9.0, 2.0), (9.0, -2.0), (4.9, 1.0), (1e-4, 1.0), (0.5, -1.0)]]]
    )
    losses, statistics = cispo.loss(tokens)
    assert gradient(losses, tokens).tolist() == pytest.approx([-10.0, 10.0, -4.9, -1e-4, 0.5], rel=1e-12)
    assert losses.tolist() == pytest.approx([10.0, -10.0, 4.9, 1e-4, -0.5], rel=1e-12)
    assert statistics["clip_high"].tolist() == [True, True, False, False, False]
    assert not statistics["clip_low"].any()
    losses, statistics = cispo.loss(tokens, clip_low=0.2)
    assert gradient(losses, tokens).tolist() == pytest.approx([-10.0, 10.0, -4.9, -0.8, 0.8], rel=1e-12)
    assert statistics["clip_low"].tolist() == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("p", "behaviour", "advantage", "cut"),
    [
        (0.75, 0.5, 1.0, "clip_high"), (0.75, 0.5, -1.0, ""), (0.69, 0.5, 1.0, ""), (0.25, 0.5, -1.0, "clip_low"), (0.25, 0.5, 1.0, ""),
        (0.31, 0.5, -1.0, ""), (0.25, 0.5, 0.0, "clip_low"), (0.75, 0.5, 0.0, ""), (0.1, 0.001, 1.0, ""),
    ],
)  # fmt: skip
def test_dppo_masks_by_probability_and_not_by_ratio(p, behaviour, advantage, cut) -> None:
    old = 0.4  # ρ is to π_old, the mask to the engine's probability
    tokens = batch([[(math.log(p), math.log(old), math.log(behaviour), advantage)]])
    losses, statistics = dppo_tv.loss(tokens)
    assert [name for name, column in statistics.items() if column.item()] == ([cut] if cut else [])
    expected = 0.0 if cut else -p / old * advantage
    assert (losses.item(), gradient(losses, tokens).item()) == pytest.approx((expected, expected), rel=1e-12)


def test_dppo_takes_its_two_bounds_apart() -> None:
    tokens = batch(
        [[(math.log(0.65), math.log(0.5), math.log(0.5), 1.0), (math.log(0.35), math.log(0.5), math.log(0.5), -1.0)]]
    )
    assert [c.tolist() for c in dppo_tv.loss(tokens, delta_low=0.1, delta_high=0.2)[1].values()] == [
        [False, True],
        [False, False],
    ]
    assert [c.tolist() for c in dppo_tv.loss(tokens, delta_low=0.2, delta_high=0.1)[1].values()] == [
        [False, False],
        [True, False],
    ]


def test_sapo_fades_with_distance_and_faster_for_a_negative_advantage() -> None:
    ratios = [1.0, 1.5, 3.0, 0.5]
    for sign, tau in ((1.0, 1.0), (-1.0, 1.05)):
        tokens = batch([[(math.log(r), 0.0, 0.0, sign) for r in ratios]])
        weights = (-sign * gradient(sapo.loss(tokens)[0], tokens)).tolist()
        assert weights == pytest.approx([r / math.cosh(tau * (r - 1) / 2) ** 2 for r in ratios], rel=1e-12)
    assert sapo.loss(batch([[(-1.0, -1.0, 0.0, 1.0), (-1.0, -1.0, 0.0, -1.0)]]))[0].tolist() == pytest.approx(
        [-2.0, 2 / 1.05], rel=1e-12
    )
