"""Does an engine compute on the grid that it claims? A quantisation option may do nothing.

Rounding to a grid moves log-probs in a way that the trainer can imitate: x = log π_q − log π, its
own weights on that grid. An engine that does round differs from the trainer by about x (exactly
where it rounds what the imitation rounds, and as far as it does so else), one that does not
differs by noise that knows nothing of x. So the slope of y = log μ − log π on x is 0 for a no-op,
and y is smaller than x. Mean |d| alone is below every alarm then: a no-op is *better*.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trueup.diagnostics.labels import regress

if TYPE_CHECKING:
    from torch import Tensor

LEAST_SLOPE = 0.5
"""Slope that a no-op is certain to stay below. Imitations of dynamic scales over a whole tensor are
the poorest and reach about as much."""
LEAST_SIZE = 0.75
"""Root mean square of y over that of x that a real rounding has at least."""
CERTAINTY = 3.1
"""Standard errors; one-sided chance .001."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridTest:
    """What a probe says of a claimed quantisation."""

    slope: float
    standard_error: float
    """Clustered by sequence; 0 where it does not exist."""
    size: float
    """Root mean square of y / that of x."""

    @property
    def refuted(self) -> bool:
        """The engine does not compute on that grid."""
        return grid_refuted(self.slope, self.standard_error, self.size)


def grid_refuted(slope: float, standard_error: float, size: float) -> bool:
    """Whether slope and size contradict the grid that an engine claims."""
    certain = standard_error > 0 and slope + CERTAINTY * standard_error < LEAST_SLOPE
    return certain and size < LEAST_SIZE


def grid_test(logp: Tensor, logp_grid: Tensor, logp_engine: Tensor, sequence: Tensor) -> GridTest:
    """Test the claim on N tokens.

    Args:
        logp: [N] the trainer's.
        logp_grid: [N] the trainer's on the grid.
        logp_engine: [N] log μ.
        sequence: [N] int64, which sequence a token is of, from 0.
    """
    own = logp.double()
    x, y = logp_grid.double() - own, logp_engine.double() - own
    found = regress(x, y, sequence, int(sequence.max()) + 1).tolist()
    return GridTest(
        slope=found[2],
        standard_error=found[3],
        size=float((y.square().mean() / x.square().mean().clamp(min=1e-30)).sqrt()),
    )
