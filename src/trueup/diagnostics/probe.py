"""Is an engine as far from the trainer as it was when it was fresh?

After a load the engine decodes a few fixed sequences and the trainer scores what it sampled. With
the weights in place, d = log π_v − log μ is rounding: its mean |d|, the *floor* of engine and
precision, is what fresh loads show. A stale LM head, a prefix cache that outlived its weights or
log-probs of another temperature add to it.

The alarm. Tokens of a sequence depend on each other, so a load with S sequences gives S numbers:
the mean |d| of each. A load is compared with the L sound ones before it (the level is the median of
their means, the variance that of sequences within loads, L(S − 1) degrees of freedom), and is an
alarm if it exceeds the level by *all* of

- t(1e-4) · √(variance · (1/S + 1/(S·L))): less than one sound load in 10,000 does so if the means
  of sequences are normal. The prompts are the same in every load, so their differences are in the
  variance and not in what is compared, which makes a false alarm rarer still;
- half of the level, because the floor itself moves as the policy learns (by less, measured);
- 1e-4 nats, below which float32 computes in another order.

What the first load may be is known of the precision alone (`health.FLOORS`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance
from typing import TYPE_CHECKING

from trueup.diagnostics.trend import t_quantile, trend

if TYPE_CHECKING:  # the rule serves readers of recorded probes, who need no tensors
    from torch import Tensor

MARGIN = 0.5
"""Share of the floor's level that a load may exceed it by, however little loads scatter."""
RESOLUTION = 1e-4
"""Nats of mean |d| that no two programs agree to."""
GROWTH = 0.1
"""Share of its level by which a gap that should not move may rise."""
_LEAST_RISE = 1e-5
_LEAST_SERIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Distance of an engine from the trainer on the tokens of one probe, in nats."""

    tokens: int
    mean: float
    """Mean |d|."""
    p99: float
    min: float
    max: float
    sequences: tuple[float, ...]
    """Mean |d| of each sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """What sound loads of an engine in one precision have shown."""

    level: float
    """Median of their mean |d|, in nats."""
    variance: float
    """Of the mean |d| of a sequence, within a load."""
    sequences: int
    """Of all these loads together."""
    freedom: int
    """Degrees of freedom of the variance."""

    def limit(self, sequences: int) -> float:
        """Largest mean |d| of a further load with so many sequences that is no alarm."""
        error = math.sqrt(self.variance * (1 / sequences + 1 / self.sequences))
        chance = t_quantile(self.freedom) * error if self.freedom else math.inf
        return self.level + max(chance, MARGIN * self.level, RESOLUTION)


def reading(logp_trainer: Tensor, logp_engine: Tensor, sequence: Tensor) -> Reading:
    """Compare scores of the same tokens.

    Args:
        logp_trainer: [N] log π_v, of the version that the engine claims.
        logp_engine: [N] log μ.
        sequence: [N] int64, which sequence a token is of, ascending.
    """
    import torch

    from trueup.diagnostics.numerics import quantile

    size = (logp_trainer.double() - logp_engine.double()).abs()
    counts = torch.unique_consecutive(sequence, return_counts=True)[1].tolist()
    means = [float(part.mean()) for part in torch.split(size, counts)]
    return Reading(
        tokens=len(size),
        mean=float(size.mean()),
        p99=float(quantile(size.sort().values, 0.99)),
        min=float(size.min()),
        max=float(size.max()),
        sequences=tuple(means),
    )


def floor_of(sound: Sequence[Reading]) -> Floor | None:
    """The floor that loads without an alarm make up; None without any."""
    if not sound:
        return None
    freedoms = [len(r.sequences) - 1 for r in sound]
    freedom = sum(freedoms)
    squares = sum(variance(r.sequences) * n for r, n in zip(sound, freedoms, strict=True) if n)
    return Floor(
        level=median(r.mean for r in sound),
        variance=squares / freedom if freedom else 0.0,
        sequences=sum(len(r.sequences) for r in sound),
        freedom=freedom,
    )


def limit_of(found: Reading, floor: Floor | None, ceiling: float | None) -> float:
    """Largest mean |d| that is no alarm: by the floor, and by what the precision explains."""
    known = [] if floor is None else [floor.limit(len(found.sequences))]
    known += [] if ceiling is None else [ceiling]
    return min(known, default=math.inf)


def growth(series: Sequence[Reading]) -> float:
    """Rise of mean |d| over loads of the same weights, relative to what may be; above 1 an alarm.

    With a learning rate of 0 nothing moves, so whatever grows is the engine's. The rise is the
    slope over all loads; it must exceed 10 % of the level and its own standard error t(1e-4) times.
    """
    means = [found.mean for found in series]
    if len(means) < _LEAST_SERIES:
        return 0.0
    slope, error = trend(means)
    rise = slope * (len(means) - 1)
    least = max(_LEAST_RISE, GROWTH * fmean(means))
    certain = slope / max(error * t_quantile(len(means) - 2), 1e-12)
    return max(0.0, min(rise / least, certain))
