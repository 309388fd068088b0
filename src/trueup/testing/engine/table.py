"""The checks, in the order in which they run: those that change what is served come last.

To add one: write an async function of a `Subject` that returns a `Finding`, add a `Check` to the
file of its family, and show in `tests/testing/engine` a fault that it finds and an honest engine
that passes.
"""

from __future__ import annotations

from trueup.testing.engine import caches, pushes, replies, sampling, scored
from trueup.testing.engine.finding import Check

CHECKS: tuple[Check, ...] = (
    *replies.CHECKS,
    *sampling.CHECKS,
    *caches.CHECKS,
    *scored.CHECKS,
    *pushes.CHECKS,
)
