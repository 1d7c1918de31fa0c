"""Numbers of a report as text for people."""

from __future__ import annotations

import math
import re


def number(value: object) -> float:
    """Return the value as a float; NaN for anything but a finite number: charts then show a gap, tables a dash."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:  # an integer beyond the range of floats
        return math.nan


def shown(value: object, percent: bool = False) -> str:
    """Return a number with three significant digits and thousands separated, or a dash if there is none.

    `percent` shows the number times 100.
    """
    x = number(value)
    if percent:
        return f"{short(100 * x)} %" if math.isfinite(100 * x) else "–"
    if math.isnan(x):
        return "–"
    return f"{x:,.0f}" if 1000 <= abs(x) < 1e9 else short(x)


def short(x: float, digits: int = 3) -> str:
    """Return a number with `digits` significant digits; exponents without leading zeros."""
    return re.sub(r"e([+-])0*", r"e\1", f"{x:.{digits}g}").replace("e+", "e")
