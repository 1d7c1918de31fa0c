"""Estimates of KL(π ‖ π_ref) in nats from tokens sampled from π, each [M], with d = log π_ref − log π within ±20.

J. Schulman, "Approximating KL divergence", 2020 (joschu.net/blog/kl-approx.html). As numbers, k1 and k3 are unbiased;
as a loss, their gradient matters, through log π alone, on tokens sampled from the same π:

    k1   ∇ log π               zero in expectation, so it has no effect. For a KL in the reward, where no gradient flows
    k2   −d · ∇ log π          that of the reverse KL(π ‖ π_ref), without bias
    k3   (1 − e^d) · ∇ log π   that of the forward KL(π_ref ‖ π): the same to first order near the reference, and far
                               from it large where π_ref is likelier

Once π has moved away from the π_old that the tokens were sampled from, all three are biased; `unbiased` is not.
"""

import math
from collections.abc import Callable

from torch import Tensor

from hybrid_rl.algo.ratio import log_ratio, ratio

Distance = Callable[[Tensor, Tensor], Tensor]  # (logprobs, ref_logprobs) [M] → [M]


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """−d: unbiased, of either sign and of high variance."""
    return -log_ratio(ref_logprobs, logprobs)


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """d² / 2: biased as a number, little near the reference; never negative."""
    return log_ratio(ref_logprobs, logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(d) − d − 1: unbiased, never negative, with less variance than −d."""
    d = log_ratio(ref_logprobs, logprobs)
    return d.expm1() - d  # expm1: exact near zero, where exp(d) − 1 cancels


ESTIMATORS: dict[str, Distance] = {"k1": k1, "k2": k2, "k3": k3}  # by the value of algo.kl.estimator


def unbiased(estimate: Distance, logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """ρ · estimate, ρ = π / π_old: over tokens sampled from π_old its mean gradient is that of the reverse KL(π ‖
    π_ref), for all three.

    k1 and k3 need the gradient through ρ as well (DeepSeek-V3.2, arXiv 2512.02556), k2 must not have it. For k3 it is
    −ρ · d · ∇ log π at every token, as for k2; for k1 a term of mean zero is added, so that its variance is highest.
    """
    weight = ratio(logprobs, old_logprobs)
    return (weight.detach() if estimate is k2 else weight) * estimate(logprobs, ref_logprobs)


def adapted(coef: float, measured: float, target: float, horizon: float) -> float:
    """Return the KL's coefficient for the next step: coef · (1 + clip(measured / target − 1, ±0.2) / horizon).

    Ziegler et al., arXiv 1909.08593, § 2.2: their K_β = 0.1 is a horizon of 10. Their code counts in episodes, this
    one in steps. A coefficient of 0 stays 0. A step that measured nothing (NaN) changes nothing.
    """
    if math.isnan(measured):
        return coef
    return coef * (1 + min(max(measured / target - 1, -0.2), 0.2) / horizon)
