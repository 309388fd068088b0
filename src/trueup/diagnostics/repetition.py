"""How much of an engine's gap a repeated decision of the engine explains, token by token.

A trainer that repeats what an engine decided inside (activation scales, routed experts, the kept
token set) is left with a residual gap. What the repetition explains is 1 − Var(residual)/Var(gap).
A cause of single tokens is named only where that is half or more: below, two causes cannot be told
apart on a token, only in distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SEPARABLE_FROM = 0.5
"""Least explained share of the variance with which a gap is split per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """What a repeated decision explains of the engine's gap."""

    tokens: int
    variance: float
    """Of the gap without the repetition, nats²."""
    share: float
    """1 − Var(residual)/Var(gap), negative where the repetition makes it worse; 0 without a gap."""

    @property
    def separable(self) -> bool:
        """Whether the gap may be split per token by this decision."""
        return self.share >= SEPARABLE_FROM

    @property
    def verdict(self) -> str:
        """In words."""
        if not self.separable:
            return f"not separable: explains {self.share:.0%} of the engine's variance"
        return f"explains {self.share:.0%} of the engine's variance"


def explained(engine: Tensor, residual: Tensor) -> Explained:
    """What is gone from the engine's gap once the trainer repeats its decision.

    Args:
        engine: [N] log π − log μ of a trainer that knows nothing, in nats.
        residual: [N] the same of one that repeats the decision.
    """
    gap, left = (x.double() for x in (engine, residual))
    variance = float(gap.var(correction=0)) if len(gap) else 0.0
    share = 1 - float(left.var(correction=0)) / variance if variance else 0.0
    return Explained(tokens=len(gap), variance=variance, share=share)
