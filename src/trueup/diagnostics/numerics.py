"""Numerics that all statistics share: one mean, one quantile, one host transfer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def quantile(ordered: Tensor, share: float) -> Tensor:
    """Exact quantile of sorted values with linear interpolation; 0 without values.

    The rank is computed on the host in double precision: `torch.quantile` refuses more than 2^24
    elements.
    """
    if not len(ordered):
        return ordered.new_zeros(())
    rank = share * (len(ordered) - 1)
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return torch.lerp(ordered[low], ordered[high], rank - low)


def safe_mean(values: Tensor) -> Tensor:
    """Mean in float64; 0 without values."""
    return values.double().sum() / max(len(values), 1)


def log_mean_exp(values: Tensor) -> Tensor:
    """The log of mean e^x in float64, whatever the size of x; 0 without values."""
    if not len(values):
        return values.new_zeros(()).double()
    return values.double().logsumexp(0) - math.log(len(values))


def to_host(values: Sequence[Tensor]) -> list[float]:
    """Scalars of any dtype as floats, in one transfer."""
    found: list[float] = torch.stack([value.double() for value in values]).tolist()
    return found
