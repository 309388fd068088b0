"""Does a series rise? A least-squares line, and how far chance carries its slope."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from statistics import fmean

FALSE_ALARM = 1e-4
"""One-sided chance of `t_quantile`."""
_FREEDOMS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 30, 50, 100)
_QUANTILES = (
    *(3183.1, 70.701, 22.205, 13.035, 9.679, 8.026, 7.064, 6.443),
    *(5.695, 5.264, 4.881, 4.54, 4.235, 4.015, 3.863),
)


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Least-squares slope per step over at least three values, and its standard error."""
    n = len(values)
    middle, mean = (n - 1) / 2, fmean(values)
    spread = sum((i - middle) ** 2 for i in range(n))
    slope = sum((i - middle) * (v - mean) for i, v in enumerate(values)) / spread
    rest = sum((v - mean - slope * (i - middle)) ** 2 for i, v in enumerate(values))
    return slope, math.sqrt(rest / (n - 2) / spread)


def t_quantile(freedom: int) -> float:
    """What Student's t with so many degrees of freedom (>= 1) exceeds by chance `FALSE_ALARM`.

    Between the entries of the table it is that of fewer degrees, which is larger.
    """
    return _QUANTILES[bisect_right(_FREEDOMS, freedom) - 1]
