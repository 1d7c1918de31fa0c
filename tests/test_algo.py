import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.algo import grpo, mean_only, mismatch, ppo_clip

rewards = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16)


def spread(values: list[float]) -> float:
    return max(values) - min(values)


# ---- advantages -------------------------------------------------------------------------------------------------------


def test_advantages_of_the_design_table() -> None:
    r = torch.tensor([1.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(grpo.advantages(r), torch.tensor([1.5, -0.5, -0.5, -0.5]), rtol=0, atol=4e-6)  # eps / σ = 2e-6
    assert mean_only.advantages(r).tolist() == [0.75, -0.25, -0.25, -0.25]


def test_grpo_divides_by_the_sample_deviation_plus_eps() -> None:
    values = [0.3, -1.7, 2.0, 0.9, 0.0]
    mean = sum(values) / 5
    sigma = math.sqrt(sum((v - mean) ** 2 for v in values) / 4)
    for eps in (1e-6, 0.5):
        expected = [(v - mean) / (sigma + eps) for v in values]
        assert grpo.advantages(torch.tensor(values, dtype=torch.float64), eps).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("estimator", [grpo.advantages, mean_only.advantages])
def test_a_group_without_a_signal_has_no_advantage(estimator) -> None:
    assert estimator(torch.tensor([3.0])).tolist() == [0.0]  # a single rollout
    for value in (0.5, 0.0, -2.0):
        assert estimator(torch.full((8,), value)).tolist() == [0.0] * 8
    noise = estimator(torch.full((7,), 0.1))  # 0.1 · 7 / 7 need not be 0.1: rounding must not become a signal
    assert noise.abs().max() < 1e-7


@pytest.mark.parametrize("estimator", [grpo.advantages, mean_only.advantages])
@given(values=rewards, data=st.data())
def test_advantages_follow_a_permutation_and_ignore_a_shift(estimator, values: list[float], data) -> None:
    order = data.draw(st.permutations(range(len(values))))
    shift = data.draw(st.integers(-8, 8))
    values = [round(v * 16) / 16 for v in values]  # exact in float, so that a shift adds no rounding
    r = torch.tensor(values, dtype=torch.float64)
    a = estimator(r)
    torch.testing.assert_close(estimator(r[list(order)]), a[list(order)], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(estimator(r + shift), a, rtol=1e-9, atol=1e-9)
    assert abs(a.sum().item()) < 1e-9 * len(values) * 10
    assert all(math.copysign(1, x) == math.copysign(1, v - r.mean()) for x, v in zip(a, r, strict=True) if abs(x) > 1e-9)


@given(values=rewards, scale=st.sampled_from([0.125, 0.5, 2.0, 64.0]))
def test_scaling_the_rewards(values: list[float], scale: float) -> None:
    values = [round(v * 16) / 16 for v in values]
    r = torch.tensor(values, dtype=torch.float64)
    torch.testing.assert_close(mean_only.advantages(scale * r), scale * mean_only.advantages(r))  # linear
    if spread(values) > 0.5:
        torch.testing.assert_close(grpo.advantages(scale * r), grpo.advantages(r), rtol=1e-4, atol=1e-4)  # does not care


def test_grpo_never_multiplies_float_noise() -> None:
    a = grpo.advantages(torch.tensor([0.1, 0.2, 0.3]).sum().repeat(16))  # 0.6 with a rounded tail, sixteen times
    assert a.tolist() == [0.0] * 16


# ---- ppo_clip ---------------------------------------------------------------------------------------------------------


def ppo_by_hand(new: float, old: float, advantage: float, low: float, high: float) -> tuple[float, float, bool]:
    """Loss, its derivative by `new`, and whether the clip silences the token, in plain float64."""
    ratio = math.exp(new - old)
    bounded = min(max(ratio, 1 - low), 1 + high)
    clipped = bounded * advantage < ratio * advantage
    return -min(ratio * advantage, bounded * advantage), 0.0 if clipped else -ratio * advantage, clipped


@given(
    tokens=st.lists(
        st.tuples(st.floats(-8, 0), st.floats(-8, 0), st.floats(-3, 3)).filter(
            lambda t: min(abs(math.exp(t[0] - t[1]) - edge) for edge in (0.8, 0.9, 1.2, 1.28)) > 1e-4
        ),
        min_size=1, max_size=12,
    ),
    bounds=st.sampled_from([(0.2, 0.2), (0.2, 0.28), (0.1, 0.2)]),
)  # fmt: skip
def test_ppo_clip_is_the_textbook_formula(tokens: list[tuple[float, float, float]], bounds: tuple[float, float]) -> None:
    new, old, advantages = (torch.tensor(column, dtype=torch.float32) for column in zip(*tokens, strict=True))
    new.requires_grad_()
    loss, clipped = ppo_clip.loss(new, old, advantages, *bounds)
    loss.sum().backward()
    facts = zip(new.tolist(), old.tolist(), advantages.tolist(), strict=True)
    expected = [ppo_by_hand(n, o, a, *bounds) for n, o, a in facts]
    assert loss.tolist() == pytest.approx([e[0] for e in expected], rel=1e-5, abs=1e-6)
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([e[1] for e in expected], rel=1e-5, abs=1e-6)
    assert clipped.tolist() == [e[2] for e in expected]
    assert clipped.dtype == torch.bool
    assert not clipped.requires_grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "silenced"),
    [
        (1.5, 2.0, -2.4, True), (1.5, -2.0, 3.0, False), (0.5, 2.0, -1.0, False), (0.5, -2.0, 1.6, True),
        (1.1, 2.0, -2.2, False), (0.9, -2.0, 1.8, False), (1.5, 0.0, 0.0, False),
    ],
)  # fmt: skip
def test_ppo_clip_silences_only_a_move_that_already_went_far_the_right_way(ratio, advantage, loss, silenced) -> None:
    new = torch.tensor([math.log(ratio)], requires_grad=True)
    value, clipped = ppo_clip.loss(new, torch.zeros(1), torch.tensor([advantage]))
    value.sum().backward()
    assert value.item() == pytest.approx(loss, rel=1e-5)
    assert clipped.tolist() == [silenced]
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(0.0 if silenced else -ratio * advantage, rel=1e-5)


def test_ppo_clip_on_policy_is_the_policy_gradient() -> None:
    new = torch.tensor([-1.0, -7.0], requires_grad=True)
    advantages = torch.tensor([0.75, -0.25])
    loss, clipped = ppo_clip.loss(new, new.detach().clone(), advantages)
    loss.sum().backward()
    assert torch.equal(loss.detach(), -advantages)
    assert torch.equal(new.grad, -advantages)
    assert not clipped.any()


@pytest.mark.parametrize("old", [-90.0, -3e38, -math.inf])
def test_ratio_stays_finite_whatever_happened(old: float) -> None:
    for new_value, old_value in ((-1.0, old), (old, -1.0)):
        new = torch.tensor([new_value] * 2, requires_grad=True)
        loss, _ = ppo_clip.loss(new, torch.tensor([old_value] * 2), torch.tensor([1.0, -1.0]))
        loss.sum().backward()
        assert loss.isfinite().all()
        assert new.grad is not None
        assert new.grad.isfinite().all()
        assert loss.abs().max() <= math.exp(20.0) * 1.001
        assert mismatch.mismatch_kl(new.detach(), torch.tensor([old_value] * 2)).isfinite().all()


def test_gradient_flows_through_the_new_logprobs_alone() -> None:
    new, old, advantages = (torch.randn(5, requires_grad=True) for _ in range(3))
    loss, _ = ppo_clip.loss(new, old.detach(), advantages.detach())
    loss.sum().backward()
    assert new.grad is not None
    assert old.grad is None
    assert advantages.grad is None


# ---- mismatch KL ------------------------------------------------------------------------------------------------------


@given(pairs=st.lists(st.tuples(st.floats(-10, 0, width=32), st.floats(-1, 1, width=32)), min_size=1, max_size=20))
def test_mismatch_kl_is_rho_minus_one_minus_log_rho(pairs: list[tuple[float, float]]) -> None:
    behaviour = torch.tensor([b for b, _ in pairs])
    train = behaviour + torch.tensor([d for _, d in pairs])
    value = mismatch.mismatch_kl(train, behaviour)
    d = (train - behaviour).double()
    expected = d.expm1() - d
    assert (value >= 0).all()
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1.2e-7 * float(d.abs().max()))  # a rounding of d itself


@pytest.mark.parametrize("d", [2**-10, -(2**-10), 2**-7, 0.25])
def test_mismatch_kl_near_zero_is_not_lost_to_cancellation(d: float) -> None:
    value = mismatch.mismatch_kl(torch.tensor([-1.0 + d]), torch.tensor([-1.0])).item()
    assert value == pytest.approx(math.expm1(d) - d, rel=1e-3 if abs(d) < 0.1 else 1e-6)
    naive = (torch.tensor(d).exp() - 1 - torch.tensor(d)).item()
    assert abs(value - (math.expm1(d) - d)) <= abs(naive - (math.expm1(d) - d)) + 1e-12


def test_mismatch_kl_of_equal_policies_is_exactly_zero() -> None:
    logprobs = -torch.rand(100) * 20
    assert mismatch.mismatch_kl(logprobs, logprobs.clone()).tolist() == [0.0] * 100


def test_mean_mismatch_kl_estimates_the_divergence() -> None:
    behaviour, train = torch.randn(2, 12, dtype=torch.float64).log_softmax(-1)
    mean = (behaviour.exp() * mismatch.mismatch_kl(train, behaviour)).sum()  # the estimator's exact expectation under behaviour
    torch.testing.assert_close(mean, (behaviour.exp() * (behaviour - train)).sum())
