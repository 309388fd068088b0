"""The one table of metrics, and the mergeable value each of them is stored as.

A metric is a sum, a count, a minimum and a maximum: partial values from shards or mini-batches
merge exactly, and a mean is never a mean of means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A mergeable statistic of scalar values."""

    sum: float
    count: float
    min: float
    max: float

    @classmethod
    def of(cls, value: float) -> Metric:
        """A single value."""
        return cls(sum=value, count=1, min=value, max=value)

    @property
    def mean(self) -> float:
        """Sum / count; NaN without values."""
        return self.sum / self.count if self.count else math.nan

    def merge(self, other: Metric) -> Metric:
        """The statistic of both sets of values together."""
        return Metric(
            sum=self.sum + other.sum,
            count=self.count + other.count,
            min=min(self.min, other.min),
            max=max(self.max, other.max),
        )
