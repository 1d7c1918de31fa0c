"""k1, k2, k3: their numbers, the gradient each has as a loss, the adaptive coefficient; and the mismatch KL."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rl.algo import kl, mismatch

ESTIMATORS = [kl.k1, kl.k2, kl.k3]
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)
pairs_of_logprobs = st.lists(
    st.tuples(st.floats(-10, 0, width=32), st.floats(-1, 1, width=32)), min_size=1, max_size=20
)

# ---- k1, k2, k3 -----------------------------------------------------------------------------------------------------


@given(pairs=st.lists(st.tuples(st.floats(-10, 0), st.floats(-10, 0)), min_size=1, max_size=20))
def test_estimators_and_their_derivatives_by_hand(pairs: list[tuple[float, float]]) -> None:
    logprobs, reference = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    logprobs.requires_grad_()
    d = [r - p for p, r in pairs]
    by_hand = {
        kl.k1: ([-x for x in d], [1.0 for _ in d]),
        kl.k2: ([x * x / 2 for x in d], [-x for x in d]),
        kl.k3: ([math.expm1(x) - x for x in d], [-math.expm1(x) for x in d]),
    }
    for estimator, (values, derivatives) in by_hand.items():
        found = estimator(logprobs, reference)
        (slope,) = torch.autograd.grad(found.sum(), logprobs)
        assert found.tolist() == pytest.approx(values, rel=1e-12, abs=1e-14)
        assert slope.tolist() == pytest.approx(derivatives, rel=1e-12, abs=1e-14)


def expectation(estimator, logits: Tensor, reference: Tensor) -> Tensor:
    """Of the estimator over tokens sampled from π, exactly; the sampling itself has no gradient."""
    logprobs = logits.log_softmax(-1)
    return (logprobs.exp().detach() * estimator(logprobs, reference)).sum()


@pytest.fixture
def policies() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    logits, reference = 1.5 * torch.randn(2, 12, dtype=torch.float64)
    return logits.requires_grad_(), reference.log_softmax(-1)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum()


def test_what_the_estimators_are_unbiased_for(policies: tuple[Tensor, Tensor]) -> None:
    logits, reference = policies
    reverse = divergence(logits.log_softmax(-1), reference)
    assert reverse > 0.5
    torch.testing.assert_close(expectation(kl.k1, logits, reference), reverse)
    torch.testing.assert_close(expectation(kl.k3, logits, reference), reverse)
    assert (expectation(kl.k2, logits, reference) - reverse).abs() > 0.05  # biased, but little near the reference
    near = (reference + 0.01 * logits.detach()).log_softmax(-1)
    torch.testing.assert_close(expectation(kl.k2, near, reference), divergence(near, reference), rtol=0.02, atol=0)


def test_what_gradient_each_estimator_has_as_a_loss(policies: tuple[Tensor, Tensor]) -> None:
    logits, reference = policies
    logprobs = logits.log_softmax(-1)
    (reverse,) = torch.autograd.grad(divergence(logprobs, reference), logits, retain_graph=True)
    (forward,) = torch.autograd.grad(divergence(reference, logprobs), logits)
    assert (reverse - forward).abs().max() > 0.05
    for estimator, expected in ((kl.k1, torch.zeros_like(reverse)), (kl.k2, reverse), (kl.k3, forward)):
        (found,) = torch.autograd.grad(expectation(estimator, logits, reference), logits)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@every_estimator
@pytest.mark.parametrize("moved", [0.0, 0.3, 1.5])
def test_the_unbiased_form_keeps_the_gradient_of_the_reverse_kl_once_the_policy_has_moved(
    estimator, moved: float, policies
) -> None:
    """Tokens sampled from an older policy, exactly: the mean over all of them, weighted by its probabilities."""
    logits, reference = policies
    old = (
        logits.detach() + moved * torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad(divergence(logprobs, reference), logits, retain_graph=True)
    (found,) = torch.autograd.grad(
        (old.exp() * kl.unbiased(estimator, logprobs, reference, old)).sum(), logits, retain_graph=True
    )
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)
    (plain,) = torch.autograd.grad((old.exp() * estimator(logprobs, reference)).sum(), logits)
    bias = float((plain - exact).norm() / exact.norm())
    assert (bias > 0.1) == (moved > 0 or estimator is not kl.k2)
    if moved == 1.5:
        assert bias > 0.17


@given(columns=st.lists(st.tuples(st.floats(-6, 0), st.floats(-6, 0), st.floats(-6, 0)), min_size=1, max_size=10))
def test_the_unbiased_form_by_hand(columns: list[tuple[float, float, float]]) -> None:
    """ρ·k1 and ρ·k3 with the gradient of both factors, ρ·k2 with that of k2 alone; of k2 and k3 it is −ρ·d."""
    new, reference, old = torch.tensor(columns, dtype=torch.float64).unbind(1)
    new.requires_grad_()
    for estimator in ESTIMATORS:
        found = kl.unbiased(estimator, new, reference, old)
        (slope,) = torch.autograd.grad(found.sum(), new)
        for (n, r, o), value, s in zip(columns, found.tolist(), slope.tolist(), strict=True):
            ratio, d = math.exp(n - o), r - n
            assert value == pytest.approx(
                ratio * {kl.k1: -d, kl.k2: d * d / 2, kl.k3: math.expm1(d) - d}[estimator], rel=1e-11, abs=1e-11
            )
            assert s == pytest.approx(ratio * (1 - d if estimator is kl.k1 else -d), rel=1e-11, abs=1e-11)


@every_estimator
@pytest.mark.parametrize("far", [-90.0, -3e38, -math.inf])
def test_estimators_stay_finite_whatever_happened(estimator, far: float) -> None:
    for value, reference in ((-1.0, far), (far, -1.0), (far, far)):
        logprobs = torch.tensor([value], requires_grad=True)
        found = estimator(logprobs, torch.tensor([reference]))
        found.sum().backward()
        assert found.isfinite().all()
        assert found.abs().max() <= math.exp(20.0) * 1.001
        assert logprobs.grad is not None
        assert logprobs.grad.isfinite().all()
    assert estimator(torch.tensor([math.nan]), torch.tensor([-1.0])).isnan().all()


@every_estimator
def test_equal_policies_are_at_no_distance(estimator) -> None:
    logprobs = -torch.rand(100) * 20
    assert estimator(logprobs, logprobs.clone()).tolist() == [0.0] * 100


# ---- adaptive coefficient ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (0.1, 0.5), (0.11, 0.5 * 1.01), (0.09, 0.5 * 0.99), (0.12, 0.5 * 1.02), (0.5, 0.5 * 1.02), (0.0, 0.5 * 0.98), (-3.0, 0.5 * 0.98),
        (math.inf, 0.5 * 1.02), (math.nan, 0.5),
    ],
)  # fmt: skip
def test_the_coefficient_follows_the_error_within_a_fifth(measured: float, expected: float) -> None:
    assert kl.adapted(0.5, measured, target=0.1, horizon=10) == pytest.approx(expected, rel=1e-12)


def test_the_coefficient_settles_where_the_target_is_met() -> None:
    coef = 0.05
    for _ in range(2000):
        coef = kl.adapted(coef, measured=0.02 / coef, target=0.1, horizon=10)  # a policy that yields to the price
    assert coef == pytest.approx(0.2, rel=1e-6)
    assert kl.adapted(0.0, 1.0, 0.1, 10) == 0.0


# ---- mismatch KL ------------------------------------------------------------------------------------------------------


@given(pairs=pairs_of_logprobs)
def test_mismatch_kl_is_rho_minus_one_minus_log_rho(pairs: list[tuple[float, float]]) -> None:
    behaviour = torch.tensor([b for b, _ in pairs])
    train = behaviour + torch.tensor([d for _, d in pairs])
    value = mismatch.mismatch_kl(train, behaviour)
    d = (train - behaviour).double()
    expected = d.expm1() - d
    assert (value >= 0).all()
    torch.testing.assert_close(
        value.double(), expected, rtol=1e-5, atol=1.2e-7 * float(d.abs().max())
    )  # a rounding of d itself


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
    torch.manual_seed(1)
    behaviour, train = torch.randn(2, 12, dtype=torch.float64).log_softmax(-1)
    mean = (
        behaviour.exp() * mismatch.mismatch_kl(train, behaviour)
    ).sum()  # the estimator's exact expectation under behaviour
    torch.testing.assert_close(mean, divergence(behaviour, train))


@pytest.mark.parametrize("far", [-90.0, -3e38, -math.inf])
def test_mismatch_kl_stays_finite_whatever_happened(far: float) -> None:
    for train, behaviour in ((-1.0, far), (far, -1.0), (far, far)):
        assert mismatch.mismatch_kl(torch.tensor([train]), torch.tensor([behaviour])).isfinite().all()
