"""How many repeats each part of the lab takes; the published part always takes the source's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Numbers of repeats."""

    repeats: int
    """Of a one-step cell beyond the published ones; at most the source's."""
    batch_repeats: int
    """Of a batch-scoped preset, which needs a gap per repeat."""
    chain: Mapping[int, int]
    """Of the chain, by its length T."""
    oracle: int
    """Of the measured minimum of MSE(α)."""
    oracle_batches: int
    """Step batches from which α is estimated."""


FULL = Effort(
    repeats=1000,
    batch_repeats=200,
    chain={1: 400, 10: 400, 100: 200, 1000: 48},
    oracle=20_000,
    oracle_batches=200,
)
QUICK = Effort(
    repeats=200,
    batch_repeats=20,
    chain={1: 100, 10: 100, 100: 20},
    oracle=2000,
    oracle_batches=20,
)
