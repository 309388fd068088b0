"""Prove from a run's records that nothing was lost, trained twice, mislabelled or too stale.

The audit reads only the run directory and changes nothing; it may be run on a live run, a finished
one, or one that was killed, which is clean up to its last row. What it checks is `MEANINGS`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trueup.errors import DataError
from trueup.records import chain
from trueup.records.audit import lifecycle, versions
from trueup.records.audit.finding import Finding
from trueup.records.audit.history import KINDS, History
from trueup.records.audit.shape import malformed
from trueup.records.audit.table import table_agrees
from trueup.records.directory import RunDirectory
from trueup.records.ledger import Ledger

__all__ = ["INVARIANTS", "MEANINGS", "Violation", "audit"]

MEANINGS: Mapping[str, str] = {
    "chain": "rows hash to their chain; no row, and no row of an actor, is missing",
    "schema": "payloads hold what their kind must carry (else nothing below is checked)",
    "I1": "every attempt issued is trained, dropped with a reason, failed, or left over; once",
    "I2": "an episode is trained in at most one surviving step",
    "I3": "groups close once, with a reason; missing members are explained",
    "I4": "every span's and probe's (engine, epoch, version) was applied before, with the digest "
    "published",
    "I5": "no token beyond the staleness bound is consumed (under `mask`: is kept)",
    "I7": "failed and withdrawn attempts have no reward and are never trained",
    "I8": "every kept token has a finite behaviour log-prob",
    "versions": "commits add one, skips none; steps follow each other; rows carry the version",
    "staleness": "ages by recorded versions = bumps counted; trained ≤ all; mean within admission",
    "table": "the episode table is what the ledger says was trained, token for token",
}
"""Every invariant by name, in the order in which they are checked."""

INVARIANTS = (
    lifecycle.attempts_are_conserved,
    lifecycle.nothing_is_trained_twice,
    lifecycle.groups_are_closed,
    lifecycle.failures_do_not_train,
    versions.provenance_is_true,
    versions.the_bound_holds,
    versions.versions_grow_by_one,
    versions.staleness_is_conserved,
)
"""Checks of the ledger by itself, each `(History) -> Iterator[Finding]`."""

_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule that the records break."""

    invariant: str
    """Its name, a key of `MEANINGS`."""
    rows: tuple[int, ...]
    """`seq` of the offending rows of the ledger, ascending; empty if it is about no single row."""
    message: str
    """The rule and the first offenders in words."""


def audit(run: RunDirectory | Path) -> list[Violation]:
    """Check every invariant; an empty list means that all of them hold.

    Args:
        run: The run's directory.

    Raises:
        RunDirectoryError: It is not the directory of a run, or its ledger is no ledger.
    """
    directory = run if isinstance(run, RunDirectory) else RunDirectory.open(run)
    book = Ledger.open(directory.ledger, readonly=True)
    try:
        with book.snapshot():
            return _grouped(_findings(book, directory))
    finally:
        book.close()


def _findings(book: Ledger, directory: RunDirectory) -> Iterator[Finding]:
    try:
        for row, message in chain.verify(book.rows(), book.head()):
            rule = "the hash chain is broken"
            yield Finding(invariant="chain", rule=rule, row=row, detail=message)
        events = list(book.events(KINDS))
    except (sqlite3.DatabaseError, DataError) as error:
        yield Finding(invariant="schema", rule="a row cannot be read", row=0, detail=str(error))
        return
    shapes = [finding for event in events for finding in malformed(event)]
    if events and events[0].kind != "run_start":
        rule = "the ledger does not begin with run_start"
        first = events[0]
        shapes.append(Finding(invariant="schema", rule=rule, row=first.seq, detail=first.kind))
    yield from shapes
    if shapes:
        return
    history = History(events)
    for invariant in INVARIANTS:
        yield from invariant(history)
    yield from table_agrees(history, directory)


def _grouped(findings: Iterable[Finding]) -> list[Violation]:
    """One violation per rule, with its first offenders in words."""
    rules: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        rules.setdefault((finding.invariant, finding.rule), []).append(finding)
    violations = []
    for (invariant, rule), found in rules.items():
        found.sort(key=lambda finding: finding.row)
        shown = [f"{f.detail} (row {f.row})" if f.row else f.detail for f in found[:_SHOWN]]
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        rows = tuple(sorted({finding.row for finding in found if finding.row}))
        message = f"{rule}: {'; '.join(shown)}{more}"
        violations.append(Violation(invariant=invariant, rows=rows, message=message))
    return violations
