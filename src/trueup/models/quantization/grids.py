"""Sets of numbers that a quantised tensor may hold, and rounding to the nearest of them.

Rounding is to nearest, ties to even, and saturates: an infinity becomes the largest number, and NaN
stays NaN. Subnormals are numbers like the others. Every number of every grid here is exact in
bfloat16, so a product of rounded operands is exact in float32 and only its sum is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_EXPONENT = 0x7F800000
_MANTISSA = 0x007FFFFF
"""The bits of a float32 that hold its exponent, and those below them."""


def power_below(x: Tensor) -> Tensor:
    """The power of two at or below each magnitude; 0 for subnormals, infinity for NaN."""
    return x.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)


def power_above(x: Tensor) -> Tensor:
    """The power of two at or above each positive normal number."""
    return x.view(torch.int32).add(_MANTISSA).bitwise_and_(_EXPONENT).view(torch.float32)


class Grid(Protocol):
    """A finite set of numbers, symmetric about 0."""

    @property
    def largest(self) -> float:
        """Its largest number."""
        ...

    def round_(self, x: Tensor) -> Tensor:
        """Replace the numbers of a float32 tensor by the nearest of the grid; returns it."""
        ...


@dataclass(frozen=True, slots=True)
class Integers:
    """The integers of [−largest, largest]."""

    largest: float

    def round_(self, x: Tensor) -> Tensor:
        """See `Grid.round_`."""
        return x.clamp_(-self.largest, self.largest).round_()


@dataclass(frozen=True, slots=True)
class Floats:
    """Floating-point numbers with a few bits, without infinities."""

    largest: float
    mantissa_bits: int
    """Stored bits of the mantissa."""
    least_exponent: int
    """That of the smallest normal number; below it steps stay as they are."""

    def round_(self, x: Tensor) -> Tensor:
        """See `Grid.round_`; 0 has no sign.

        A float32 that is 1.5 · 2^23 steps large has no room for less than a step, so adding it and
        taking it away again leaves x rounded by the processor's own rule.
        """
        x.clamp_(-self.largest, self.largest)
        power = power_below(x).clamp_(min=2.0**self.least_exponent)
        power.mul_(1.5 * 2 ** (23 - self.mantissa_bits))
        return x.add_(power).sub_(power)


E4M3 = Floats(largest=448.0, mantissa_bits=3, least_exponent=-6)
"""The numbers of `torch.float8_e4m3fn` [OCP 8-bit floating point, 1.0]."""
E2M1 = Floats(largest=6.0, mantissa_bits=1, least_exponent=0)
"""0, ½, 1, 1½, 2, 3, 4, 6 and their negatives [OCP microscaling formats, 1.0]."""
INT8 = Integers(largest=127.0)
INT4 = Integers(largest=7.0)
"""Without −8, which has no counterpart."""
