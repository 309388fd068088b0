"""Rejection of ratios outside a band [MIS; IcePop of the Ring-1T report].

Bounds are in ratio space, inclusive, and may be asymmetric: [.5, 5] keeps ρ = 4 and rejects ρ = .3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueup.corrections.preset import Constants, Ratios
from trueup.gap import exp_clamped

if TYPE_CHECKING:
    from torch import Tensor


def inside(log_ratio: Tensor, *, low: float, high: float) -> Tensor:
    """[N] bool: low ≤ ρ ≤ high.

    Compared as float32 ratios, so that the rounded logarithm of a bound is inside.
    """
    ratio = exp_clamped(log_ratio)
    return (ratio >= low) & (ratio <= high)


def band_filter(ratios: Ratios, constants: Constants) -> Tensor:
    """Keep the tokens whose ratio is inside [low, high]."""
    return inside(ratios.log_ratio, low=constants["low"], high=constants["high"])
