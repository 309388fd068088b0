"""What an experiment hands back: numbers first, tables and figures made from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trueup.reports.figure_data import Figure

Tell = Callable[[str], None]
"""Says how far a long experiment is."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of printed cells."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        """The table as Markdown that also reads well at a prompt."""
        lines = [self.head, *self.rows]
        width = [max(len(line[i]) for line in lines) for i in range(len(self.head))]
        shown = [
            "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, width, strict=True)) + " |"
            for line in lines
        ]
        rule = "|" + "|".join("-" * (w + 2) for w in width) + "|"
        parts = [f"**{self.title}**", "", shown[0], rule, *shown[1:]]
        return "\n".join([*parts, "", self.note] if self.note else parts)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was found."""

    result: dict[str, Any]
    """Everything measured, for `result.json`."""
    differences: Sequence[str]
    """Each printed digit of the source that was not reproduced, in words; empty if all were."""
    tables: Sequence[Table]
    figures: Sequence[Figure]


Run = Callable[[bool, Tell], Outcome]
"""Runs an experiment; the first argument asks for fewer repeats of what the source does not
print."""
