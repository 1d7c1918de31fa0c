"""Student's distribution, intervals and paired tests against scipy's."""

import math

import pytest

from hybrid_rl.report.intervals import interval, paired, quantile, within

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 9, 31, 200])
def test_student_s_distribution(freedom):
    for t in (0.0, 0.3, 1.0, 2.5, 12.0):
        assert within(t, freedom) == pytest.approx(1 - 2 * stats.t.sf(t, freedom), abs=1e-12)
    for share in (0.5, 0.95, 0.99):
        assert quantile(share, freedom) == pytest.approx(stats.t.ppf((1 + share) / 2, freedom), rel=1e-9)


def test_interval():
    values = [0.2, 0.5, 0.4, 0.9]
    low, high = stats.t.interval(0.95, 3, loc=0.5, scale=stats.sem(values))
    assert interval(values) == pytest.approx((0.5, (high - low) / 2))
    assert interval([0.7])[0] == 0.7
    assert math.isnan(interval([0.7])[1])
    assert all(map(math.isnan, interval([])))


def test_paired():
    one, two = [0.2, 0.5, 0.4, 0.9], [0.3, 0.7, 0.4, 0.8]
    assert paired([a - b for a, b in zip(one, two, strict=True)]) == pytest.approx(stats.ttest_rel(one, two).pvalue)
    assert paired([0.0, 0.0]) == 1
    assert 0 <= paired([0.9, 1.0] * 660) < 1e-300 or paired([0.9, 1.0] * 660) == 0
    assert paired([0.25, 0.25]) == 0
    assert math.isnan(paired([0.1]))
