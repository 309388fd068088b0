"""What a check is and what it says."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trueup.testing.engine.subject import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of a check."""

    ok: bool
    measured: str
    """With its unit, and how many tokens or replies it is of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that must be true of an engine."""

    name: str
    expected: str
    usually: str
    """What is usually wrong where it does not hold."""
    false_alarm: str
    """Chance that it fails on an engine that is right; how many nats of noise it allows."""
    run: Callable[[Subject], Coroutine[None, None, Finding]]
    """Raises `NotExpressible` where the check cannot be made."""

    def said(self, measured: str) -> str:
        """The whole sentence of a failure."""
        return (
            f"{self.name}: expected {self.expected}; measured {measured}. "
            f"Usually: {self.usually} (false alarm: {self.false_alarm})"
        )
