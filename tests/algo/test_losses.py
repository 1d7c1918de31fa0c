"""Every loss against plain Python float64, a derivative by hand, autograd of its formula, and what all of them
promise."""

import inspect
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hydra.utils import get_method, instantiate
from hypothesis import assume, given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor

from hybrid_rl.algo import aggregation, cispo, clip_cov, dppo_tv, gmpo, gspo, kl_cov, ppo_clip, reinforce, sapo
from hybrid_rl.algo.batch import Tokens

CONF = Path(__file__).parents[2] / "conf/algo/loss"
LOSSES: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
    "ppo_clip": ppo_clip.loss,
    "clip_higher": partial(ppo_clip.loss, clip_high=0.28),
    "without_dual_clip": partial(ppo_clip.loss, dual_clip=None),
    "gspo": gspo.loss,
    "gspo_wide": partial(gspo.loss, clip_low=0.2, clip_high=0.28),
    "cispo": cispo.loss,
    "cispo_narrow": partial(cispo.loss, clip_low=0.2, clip_high=0.28),
    "dppo_tv": dppo_tv.loss,
    "sapo": sapo.loss,
    "reinforce": reinforce.loss,
    "gmpo": gmpo.loss,
    "clip_cov": clip_cov.loss,
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
Token = tuple[float, float, float, float]  # log π_θ, log π_old, log μ, A

logprob = st.floats(-6, 0)
advantage = st.integers(-192, 192).map(lambda n: n / 64)
token = st.tuples(logprob, logprob, logprob, advantage)
near = st.tuples(logprob, st.floats(-0.5, 0.5), st.floats(-0.5, 0.5), advantage).map(
    lambda t: (t[0], t[0] + t[1], t[0] + t[2], t[3])
)
aggregations = st.sampled_from([aggregation.token_mean, aggregation.seq_mean, aggregation.fixed])
rollouts = st.lists(st.lists(near | token, min_size=1, max_size=5), min_size=1, max_size=6)


def batch(given_rollouts: list[list[Token]], dtype: torch.dtype = torch.float64) -> Tokens:
    columns = zip(*(t for r in given_rollouts for t in r), strict=True)
    new, old, behaviour, advantages = (torch.tensor(column, dtype=dtype) for column in columns)
    rollout = torch.tensor([i for i, r in enumerate(given_rollouts) for _ in r])
    return Tokens(
        new.requires_grad_(), old, behaviour, advantages, rollout, torch.ones_like(old), (old * 64).frac() < -0.5
    )


def at(tokens: Tokens, index: Tensor) -> Tokens:
    new = tokens.logprobs.detach()[index].requires_grad_()
    names = ("old_logprobs", "behaviour_logprobs", "advantages", "rollout", "entropy", "look")
    return Tokens(new, *(getattr(tokens, name)[index] for name in names))


def gradient(losses: Tensor, tokens: Tokens, weights: Tensor | float = 1.0) -> Tensor:
    (found,) = torch.autograd.grad((weights * losses).sum(), tokens.logprobs, retain_graph=True)
    return found


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


# ---- what every loss promises -------------------------------------------------------------------------------------------


@every_loss
@given(given_rollouts=rollouts, data=st.data())
def test_order_means_nothing(loss, given_rollouts: list[list[Token]], data) -> None:
    tokens = batch(given_rollouts)
    order = torch.tensor(data.draw(st.permutations(range(len(tokens.rollout)))))
    losses, statistics = loss(tokens)
    moved = at(tokens, order)
    moved.rollout = 1000 - 7 * moved.rollout  # nor do the rollouts' numbers
    permuted, others = loss(moved)
    torch.testing.assert_close(permuted, losses[order], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(permuted, moved), gradient(losses, tokens)[order], rtol=1e-12, atol=1e-12)
    assert all(torch.equal(others[name], column[order]) for name, column in statistics.items())


@every_loss
@given(given_rollouts=rollouts, aggregate=aggregations, data=st.data())
def test_micro_batches_add_up_to_the_batch(loss, aggregate, given_rollouts: list[list[Token]], data) -> None:
    tokens = batch(given_rollouts)
    count = len(given_rollouts)
    kept = torch.tensor(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))[tokens.rollout]
    weights, divisor = aggregate(kept, tokens.rollout, 64)
    total = (weights * loss(tokens)[0]).sum() / divisor
    whole = gradient(loss(tokens)[0], tokens, weights / divisor)
    chunk = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))[tokens.rollout]
    sums, parts = torch.zeros((), dtype=torch.float64), torch.zeros_like(whole)
    for number in range(3):  # one of them may be empty
        index = (chunk == number).nonzero().squeeze(1)
        own = at(tokens, index)
        losses, _ = loss(own)
        sums += (weights[index] * losses).sum().detach() / divisor
        parts[index] = gradient(losses, own, weights[index] / divisor)
    torch.testing.assert_close(sums, total.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


@every_loss
@given(given_rollouts=rollouts, aggregate=aggregations, data=st.data())
def test_a_masked_rollout_leaves_no_trace(loss, aggregate, given_rollouts: list[list[Token]], data) -> None:
    count = len(given_rollouts)
    keep = data.draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(any))
    broken = [r if k else [(-math.inf, -1.0, -math.inf, 1e6), *r] for r, k in zip(given_rollouts, keep, strict=True)]
    results = []
    for members, mask in (
        (broken, keep),
        ([r for r, k in zip(given_rollouts, keep, strict=True) if k], [True] * sum(keep)),
    ):
        tokens = batch(members)
        kept = torch.tensor(mask)[tokens.rollout]
        weights, divisor = aggregate(kept, tokens.rollout, 64)
        losses, _ = loss(tokens)
        slope = gradient(losses, tokens, weights.double() / divisor)
        assert slope[~kept].count_nonzero() == 0
        results.append(((weights * losses).sum().detach() / divisor, slope[kept]))
    share = 1.0 if aggregate is aggregation.token_mean else sum(keep) / count  # the others' divisors count it
    torch.testing.assert_close(results[0], tuple(share * r for r in results[1]), rtol=1e-12, atol=1e-12)


@every_loss
@given(given_rollouts=rollouts, scale=st.sampled_from([0.125, 0.5, 4.0, 64.0]))
def test_scaling_the_advantages_scales_loss_and_gradient(loss, given_rollouts: list[list[Token]], scale: float) -> None:
    tokens = batch(given_rollouts)
    losses, statistics = loss(tokens)
    slope = gradient(losses, tokens)
    tokens.advantages = scale * tokens.advantages  # a power of two: exact
    scaled, others = loss(tokens)
    torch.testing.assert_close(scaled, scale * losses, rtol=1e-14, atol=1e-300)
    torch.testing.assert_close(gradient(scaled, tokens), scale * slope, rtol=1e-14, atol=1e-300)
    assert all(torch.equal(others[name], column) for name, column in statistics.items())


@every_loss
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_on_policy_the_gradient_is_the_policy_gradient(loss, lengths: list[int], seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    rollout = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    logprobs = (-7 * torch.rand(len(rollout), generator=generator)).to(dtype)
    advantages = torch.randn(len(lengths), generator=generator).to(dtype)[rollout]  # one a rollout, as GSPO has it
    tokens = Tokens(logprobs.clone().requires_grad_(), logprobs, logprobs, advantages, rollout, logprobs, rollout < 0)
    losses, statistics = loss(tokens)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(gradient(losses, tokens), -advantages, rtol=tolerance, atol=0)
    assert not any(column.any() for column in statistics.values())


def test_ppo_clip_on_policy_is_exact_in_float32() -> None:
    logprobs, advantages = torch.tensor([-1.0, -7.0]), torch.tensor([0.75, -0.25])
    tokens = Tokens(logprobs.clone().requires_grad_(), logprobs, logprobs, advantages, torch.tensor([0, 1]), logprobs)
    losses, _ = ppo_clip.loss(tokens)
    assert torch.equal(losses, -advantages)
    assert torch.equal(gradient(losses, tokens), -advantages)


EXTREMES = [-math.inf, -3e38, -1e5, -90.0, -1.0, 0.0]


@every_loss
def test_loss_and_gradient_stay_finite_whatever_happened(loss) -> None:
    facts = [(new, old, mu, a) for new in EXTREMES for old in EXTREMES for mu in EXTREMES for a in (2.0, -2.0, 0.0)]
    for together in ([facts], [[f] for f in facts]):  # all one rollout's, or one each
        tokens = batch(together, torch.float32)
        losses, statistics = loss(tokens)
        assert losses.isfinite().all()
        assert losses.abs().max() <= 2 * math.exp(20) * 1.001
        assert gradient(losses, tokens).isfinite().all()
        assert all(column.float().isfinite().all() for column in statistics.values())


@every_loss
def test_a_nan_is_not_hidden(loss) -> None:
    tokens = batch([[(math.nan, -1.0, -1.0, 1.0)], [(-1.0, -1.0, -1.0, 1.0)]], torch.float32)
    assert loss(tokens)[0].isnan().tolist() == [
        True,
        False,
    ]  # a broken forward must reach the gradient's norm, where a step is refused


@every_loss
def test_gradient_flows_through_the_new_logprobs_alone(loss) -> None:
    torch.manual_seed(1)
    columns = [(-3 * torch.rand(6)).requires_grad_() for _ in range(4)]
    tokens = Tokens(
        columns[0],
        *(c.detach() for c in columns[1:]),
        torch.tensor([0, 0, 1, 1, 1, 2]),
        torch.ones(6),
        torch.zeros(6, dtype=torch.bool),
    )
    before = [c.detach().clone() for c in columns]
    losses, statistics = loss(tokens)
    assert losses.shape == (6,)
    assert losses.dtype == torch.float32
    losses.sum().backward()
    assert columns[0].grad is not None
    assert all(c.grad is None for c in columns[1:])
    assert all(torch.equal(c.detach(), b) for c, b in zip(columns, before, strict=True))
    assert {"clip_low", "clip_high"} <= statistics.keys()
    assert all(column.shape == (6,) and not column.requires_grad for column in statistics.values())


@every_loss
def test_no_tokens_is_no_error(loss) -> None:
    empty = torch.zeros(0)
    tokens = Tokens(torch.zeros(0, requires_grad=True), empty, empty, empty, empty.long(), empty, empty.bool())
    losses, statistics = loss(tokens)
    assert losses.shape == (0,)
    assert gradient(losses, tokens).shape == (0,)
    assert all(column.shape == (0,) for column in statistics.values())


# ---- conf/algo/loss -----------------------------------------------------------------------------------------------------


def test_every_option_file_is_a_loss_with_its_defaults() -> None:
    names = {path.stem for path in CONF.glob("*.yaml")}
    assert names == {
        "ppo_clip",
        "clip_higher",
        "gspo",
        "cispo",
        "dppo_tv",
        "sapo",
        "reinforce",
        "gmpo",
        "kl_cov",
        "clip_cov",
    }
    for name in names:
        text = (CONF / f"{name}.yaml").read_text()
        assert text.startswith("# ")
        option = OmegaConf.to_container(OmegaConf.create(text))
        defaults = {
            k: p.default
            for k, p in inspect.signature(get_method(option["_target_"])).parameters.items()
            if k != "tokens"
        }
        assert option == {
            "_target_": option["_target_"],
            **defaults,
            **({"clip_high": 0.28} if name == "clip_higher" else {}),
        }
        tokens = batch([[(-1.0, -1.25, -1.5, 1.0), (-1.0, -0.5, -1.5, -1.0)]])
        expected = LOSSES.get(name, kl_cov.loss)
        assert torch.equal(instantiate(option, _partial_=True)(tokens)[0], expected(tokens)[0])
