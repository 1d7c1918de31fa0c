"""Advantages of tokens: whitened, with a critic, from a greedy completion or a teacher; float64 loops as the other
opinion."""

import math
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.algo import gae, mean_only, opd, reinforce_pp, remax, vtrace
from hybrid_rl.algo.batch import Scored
from tests.batches import batches, close, logprob, number, rollouts, scored, spread, whitened

# ---- REINFORCE++ --------------------------------------------------------------------------------------------------------


@given(batch=batches())
def test_reinforce_pp_by_hand(batch: Scored) -> None:
    kept = spread(batch, batch.kept.tolist())
    rewards = [o + sum(p) for o, (p,) in zip(batch.outcomes.tolist(), rollouts(batch, "penalties"), strict=True)]
    groups = torch.tensor(rewards, dtype=torch.float64).split(list(batch.group_sizes))
    centred = [r - fmean(g.tolist()) for g in groups for r in g.tolist()]
    close(reinforce_pp.advantages(batch), whitened(spread(batch, centred), kept), rel=1e-6, abs=1e-6)
    returns = []
    for outcome, (penalties,) in zip(batch.outcomes.tolist(), rollouts(batch, "penalties"), strict=True):
        returns += [outcome + sum(penalties[t:]) for t in range(len(penalties))]
    close(reinforce_pp.advantages(batch, baseline=False), whitened(returns, kept), rel=1e-6, abs=1e-6)


@given(batch=batches())
def test_reinforce_pp_is_white_over_the_kept_tokens_and_zero_elsewhere(batch: Scored) -> None:
    kept = batch.to_tokens(batch.kept)
    for baseline in (True, False):
        a = reinforce_pp.advantages(batch, baseline)
        assert a.shape == kept.shape
        assert (a[~kept] == 0).all()
        if (a != 0).any():
            assert abs(a[kept].mean().item()) < 1e-9
            assert a[kept].var(correction=1).item() == pytest.approx(1, abs=1e-4)


def test_what_is_not_kept_is_not_in_the_statistics() -> None:
    few = scored([[1, 0, 0.5, 0]], [2, 1, 1, 3], kept=[True, True, True, False])
    many = scored([[1, 0, 0.5, 0]], [2, 1, 1, 900], kept=[True, True, True, False])
    for baseline in (True, False):
        a, b = reinforce_pp.advantages(few, baseline), reinforce_pp.advantages(many, baseline)
        assert torch.equal(a[:4], b[:4])
        assert a[:4].abs().min() > 0


def test_a_long_rollout_weighs_by_its_tokens() -> None:
    a = reinforce_pp.advantages(scored([[1, 0]], [1, 3]))
    assert a[0].item() == pytest.approx(1.5, rel=1e-6)  # 0.5 and three of −0.5: mean −0.25, deviation 0.5
    assert a[1:].tolist() == pytest.approx([-0.5] * 3, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("baseline", [True, False])
def test_whitening_nothing_gives_nothing(dtype: torch.dtype, baseline: bool) -> None:
    for value in (0.1, 0.0, -3.0, 1e6 / 3):
        assert reinforce_pp.advantages(scored([[value] * 7], [2] * 7, dtype), baseline).tolist() == [0] * 14
    one = scored([[1, 0]], [1, 4], dtype, kept=[True, False])
    assert reinforce_pp.advantages(one, baseline).tolist() == [0] * 5
    none = scored([[1, 0]], [1, 4], dtype, kept=[False, False])
    assert reinforce_pp.advantages(none, baseline).tolist() == [0] * 5


# ---- with a critic ------------------------------------------------------------------------------------------------------


def rewards_of(batch: Scored) -> list[list[float]]:
    return [[*p[:-1], p[-1] + o] for o, (p,) in zip(batch.outcomes.tolist(), rollouts(batch, "penalties"), strict=True)]


@given(batch=batches(values=number), gamma=st.sampled_from([1.0, 0.9, 0.0]), lam=st.sampled_from([0.95, 0.5, 1.0, 0.0]))
def test_gae_by_recursion(batch: Scored, gamma: float, lam: float) -> None:
    expected, targets = [], []
    for r, (v,) in zip(rewards_of(batch), rollouts(batch, "values"), strict=True):

        def at(t: int, r: list[float] = r, v: list[float] = v) -> float:
            return (
                0.0
                if t == len(r)
                else r[t] + gamma * (v[t + 1] if t + 1 < len(r) else 0.0) - v[t] + gamma * lam * at(t + 1)
            )

        expected += [at(t) for t in range(len(r))]
        targets += [at(t) + v[t] for t in range(len(r))]
    advantages, actual_targets = gae.advantages(batch, gamma, lam, whiten=False)
    close(advantages, expected)
    close(actual_targets, targets)
    white, same_targets = gae.advantages(batch, gamma, lam)
    assert torch.equal(same_targets, actual_targets)  # a target is in the reward's own units
    if max(expected) - min(expected) > 1e-3:
        close(white, whitened(expected, spread(batch, batch.kept.tolist())), rel=1e-6, abs=1e-6)


@given(batch=batches(values=number))
def test_gae_telescopes(batch: Scored) -> None:
    """λ = 1: all that is still to come, less the value. λ = 0: one step ahead. A perfect critic leaves nothing."""
    advantages, targets = gae.advantages(batch, lam=1.0, whiten=False)
    returns = [sum(r[t:]) for r in rewards_of(batch) for t in range(len(r))]
    assert batch.values is not None
    close(targets, returns)
    close(advantages, [g - v for g, v in zip(returns, batch.values.tolist(), strict=True)])
    batch.values = torch.tensor(returns, dtype=torch.float64)
    for lam in (0.0, 0.5, 1.0):
        close(gae.advantages(batch, lam=lam, whiten=False)[0], [0.0] * len(returns))


def test_gae_defaults() -> None:
    batch = scored([[1, 0]], [2, 1], values=[0.25, 0.5, 0.0])
    assert all(
        torch.equal(a, b) for a, b in zip(gae.advantages(batch), gae.advantages(batch, 1.0, 0.95, True), strict=True)
    )


@given(batch=batches(values=number), lam=st.sampled_from([0.0, 0.5, 0.95]), own=st.sampled_from([0.0, 0.5, 1.0]))
def test_gae_with_a_lambda_of_its_own_for_the_critic(batch: Scored, lam: float, own: float) -> None:
    """Advantages as without it; targets as if the critic's λ were the only one."""
    advantages, targets = gae.advantages(batch, lam=lam, critic_lam=own)
    assert torch.equal(advantages, gae.advantages(batch, lam=lam)[0])
    assert torch.equal(targets, gae.advantages(batch, lam=own)[1])


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [1000, 1, 64, 65, 63, 2]])
def test_long_rollouts_and_short_ones_in_one_scan(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = {
        n: torch.randn(sum(lengths), generator=generator, dtype=torch.float64).tolist() for n in ("values", "penalties")
    }
    batch = scored([[1.0] * len(lengths)], lengths, **tokens)
    expected: list[float] = []
    for r, (v,) in zip(rewards_of(batch), rollouts(batch, "values"), strict=True):
        own, after, value = [], 0.0, 0.0
        for t in reversed(range(len(r))):
            after = r[t] + 0.99 * value - v[t] + 0.99 * 0.95 * after
            value = v[t]
            own.append(after)
        expected += own[::-1]
    close(gae.advantages(batch, 0.99, 0.95, whiten=False)[0], expected, rel=1e-9, abs=1e-9)


@given(
    batch=batches(values=number, old_logprobs=logprob, behaviour_logprobs=logprob),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([1.0, 0.7, 0.0]),
    bars=st.sampled_from([(1.0, 1.0), (2.0, 0.5), (1e9, 1e9)]),
)
def test_vtrace_is_the_sum_of_products_of_the_paper(
    batch: Scored, gamma: float, lam: float, bars: tuple[float, float]
) -> None:
    expected, advantages = [], []
    columns = rollouts(batch, "values", "old_logprobs", "behaviour_logprobs")
    for r, (v, old, behaviour) in zip(rewards_of(batch), columns, strict=True):
        end = len(r)
        w = [math.exp(o - b) for o, b in zip(old, behaviour, strict=True)]
        rho, c = [min(bars[0], x) for x in w], [lam * min(bars[1], x) for x in w]
        value = [*v, 0.0]
        delta = [rho[t] * (r[t] + gamma * value[t + 1] - v[t]) for t in range(end)]
        target = [
            v[s] + sum(gamma ** (t - s) * math.prod(c[s:t]) * delta[t] for t in range(s, end)) for s in range(end)
        ] + [0.0]
        expected += target[:-1]
        advantages += [rho[t] * (r[t] + gamma * target[t + 1] - v[t]) for t in range(end)]
    actual, targets = vtrace.advantages(batch, gamma, lam, *bars)
    close(targets, expected, rel=1e-9, abs=1e-9)
    close(actual, advantages, rel=1e-9, abs=1e-9)


@given(
    batch=batches(values=number, old_logprobs=logprob),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([1.0, 0.95, 0.0]),
)
def test_vtrace_of_its_own_policy_has_the_targets_of_gae(batch: Scored, gamma: float, lam: float) -> None:
    batch.behaviour_logprobs = batch.old_logprobs.clone()
    advantages, targets = vtrace.advantages(batch, gamma, lam)
    expected_advantages, expected = gae.advantages(batch, gamma, lam, whiten=False)
    torch.testing.assert_close(targets, expected, rtol=1e-12, atol=1e-12)
    if lam == 1:
        torch.testing.assert_close(advantages, expected_advantages, rtol=1e-9, atol=1e-9)


def test_vtrace_cuts_the_ratio_and_then_takes_lambda() -> None:
    batch = scored(
        [[1]], [3], values=[0.5] * 3, old_logprobs=[math.log(2), math.log(0.5), 0], behaviour_logprobs=[0] * 3
    )
    advantages, targets = vtrace.advantages(batch, lam=0.5)  # c = 0.5 · [min(1, 2), 0.5]
    close(targets, [0.5 + 0.5 * 0.25 * 0.5, 0.5 + 0.25 * 0.5, 1])
    close(advantages, [0.125, 0.25, 0.5])


def test_a_scan_writes_to_none_of_its_columns() -> None:
    batch = scored([[1, 0]], [2, 3])
    addend, decay = torch.ones(5, dtype=torch.float64), torch.full((5,), 0.5, dtype=torch.float64)
    close(gae.discounted(batch, addend, decay), [1.5, 1, 1.75, 1.5, 1])
    assert addend.tolist() == [1] * 5
    assert decay.tolist() == [0.5] * 5


def test_vtrace_default_bars_are_one_and_a_ratio_without_bounds_stays_finite() -> None:
    batch = scored([[1]], [2], values=[0.0, 0.0], old_logprobs=[math.log(4), -math.inf], behaviour_logprobs=[0, 0])
    advantages, targets = vtrace.advantages(batch)
    close(targets, [math.exp(-20)] * 2)  # a token that the policy would no longer sample teaches nothing
    close(advantages, [math.exp(-20)] * 2)
    batch.old_logprobs = torch.tensor([500.0, 500.0], dtype=torch.float64)
    for a in vtrace.advantages(batch, rho_bar=math.inf, c_bar=math.inf):
        assert a.isfinite().all()


# ---- ReMax and distillation -----------------------------------------------------------------------------------------------


@given(batch=batches(), data=st.data())
def test_remax_by_hand(batch: Scored, data) -> None:
    greedy = data.draw(st.lists(number, min_size=len(batch.outcomes), max_size=len(batch.outcomes)))
    batch.greedy = torch.tensor(greedy, dtype=torch.float64)
    expected = [sum(r[t:]) - g for r, g in zip(rewards_of(batch), greedy, strict=True) for t in range(len(r))]
    close(remax.advantages(batch), expected)


@given(
    batch=batches(teacher_logprobs=logprob, behaviour_logprobs=logprob, old_logprobs=logprob),
    weight=st.sampled_from([1.0, 0.25]),
)
def test_opd_by_hand(batch: Scored, weight: float) -> None:
    columns = rollouts(batch, "teacher_logprobs", "behaviour_logprobs")
    distilled = [weight * (t - b) for teacher, behaviour in columns for t, b in zip(teacher, behaviour, strict=True)]
    close(opd.advantages(batch, weight), distilled)
    of_rollouts = spread(batch, mean_only.advantages(batch).tolist())
    close(
        opd.advantages(batch, weight, mean_only.advantages),
        [d + a for d, a in zip(distilled, of_rollouts, strict=True)],
    )
    of_tokens = reinforce_pp.advantages(batch).tolist()
    close(
        opd.advantages(batch, weight, reinforce_pp.advantages),
        [d + a for d, a in zip(distilled, of_tokens, strict=True)],
    )


def test_opd_is_bounded_before_it_is_weighted() -> None:
    batch = scored([[0]], [3], teacher_logprobs=[-math.inf, -1, -1], behaviour_logprobs=[-1, -90, -1.5])
    close(opd.advantages(batch, 3.0), [-60, 60, 1.5])


def test_mean_opd_advantage_is_minus_the_divergence_from_the_teacher() -> None:
    student, teacher = torch.randn(2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log_softmax(
        -1
    )
    batch = scored([[0.0]], [12], teacher_logprobs=teacher.tolist(), behaviour_logprobs=student.tolist())
    mean = (student.exp() * opd.advantages(batch)).sum()  # the exact expectation under the student
    torch.testing.assert_close(mean, -(student.exp() * (student - teacher)).sum())
