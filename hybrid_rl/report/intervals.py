"""Means over a few seeds: Student's t intervals and paired tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev


def within(t: float, freedom: int) -> float:
    """Return P(|T| ≤ t) of Student's distribution with `freedom` ≥ 1 degrees.

    Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    if freedom == 1:
        return 2 * angle / math.pi
    odd = freedom % 2
    term, total = (cosine, cosine) if odd else (1.0, 1.0)
    for k in range(2 + odd, freedom - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def quantile(share: float, freedom: int) -> float:
    """Return the t with P(|T| ≤ t) = `share`, from 0 to below 1."""
    low, high = 0.0, 1.0
    while within(high, freedom) < share:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, freedom) < share else (low, middle)
    return high


def interval(values: Sequence[float], share: float = 0.95) -> tuple[float, float]:
    """Return the mean and half the width of its interval; NaN for what the number of values does not give."""
    if not values:
        return math.nan, math.nan
    if len(values) == 1:
        return values[0], math.nan
    return fmean(values), quantile(share, len(values) - 1) * stdev(values) / math.sqrt(len(values))


def paired(differences: Sequence[float]) -> float:
    """Return the two-sided p of a paired t test, from the differences of the pairs; NaN for fewer than two."""
    if len(differences) < 2:
        return math.nan
    mean, spread = fmean(differences), stdev(differences)
    if spread == 0:
        return 0.0 if mean else 1.0
    # rounding may take it below 0
    return max(0.0, 1 - within(abs(mean) / spread * math.sqrt(len(differences)), len(differences) - 1))
