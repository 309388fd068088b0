"""What a check yields."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One offence against one rule of an invariant."""

    invariant: str
    rule: str
    """What must hold, or what is wrong, in words; findings are grouped by it."""
    row: int
    """`seq` of the offending row; 0 if it is not one row of the ledger."""
    detail: str
