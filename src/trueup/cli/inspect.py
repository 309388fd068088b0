"""`trueup report` and `trueup audit`: what a run did, and whether its records prove it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trueup.cli.output import FAILED, OK, UNKNOWN, AsJson, draw, emit, show
from trueup.cli.runs import shown
from trueup.records.directory import RunDirectory

if TYPE_CHECKING:
    from trueup.records.audit import Violation

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")]


def report(
    path: Run,
    as_json: AsJson = False,
    browse: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
) -> None:
    """Show what a run did and write its report.html; also of a running or killed run."""
    from trueup.reports.html import write_report
    from trueup.reports.live import final_table
    from trueup.reports.summary import summarise

    run = RunDirectory.open(path)
    summary = summarise(run.path)
    page = write_report(run.path)
    if as_json:
        emit({**summary.as_json(), "ended": summary.ended, "report": str(shown(page))})
    else:
        draw(final_table(summary))
        show(f"report: {shown(page)}")
    if browse:
        typer.launch(page.as_uri())


def audit(path: Run, as_json: AsJson = False) -> None:
    """Prove from a run's records that nothing was lost, trained twice, mislabelled or too stale."""
    from trueup.records.audit import audit as violations_of
    from trueup.records.ledger import Ledger

    run = RunDirectory.open(path)
    violations = violations_of(run)
    if as_json:
        found = [
            {"invariant": v.invariant, "rows": v.rows, "message": v.message} for v in violations
        ]
        emit({"ok": not violations, "violations": found})
    else:
        with closing(Ledger.open(run.ledger, readonly=True)) as ledger:
            rows, _ = ledger.head()
        tables = len(list(run.episodes.glob("*.parquet")))
        show(f"{shown(run.path)}: {rows} rows of the ledger, {tables} episode tables")
        for line in verdicts(violations):
            show(line)
    if violations:
        raise typer.Exit(1)


def verdicts(violations: Sequence[Violation]) -> list[str]:
    """One line per invariant, and one per rule of it that is broken."""
    from trueup.records.audit import MEANINGS

    broken = {violation.invariant for violation in violations}
    malformed = "schema" in broken
    lines = []
    for name, meaning in MEANINGS.items():
        unchecked = malformed and name not in ("chain", "schema")
        mark = FAILED if name in broken else UNKNOWN if unchecked else OK
        lines.append(f"{mark} {name:10} {meaning}{' (not checked)' if mark == UNKNOWN else ''}")
        lines += [f"             {v.message}" for v in violations if v.invariant == name]
    return lines
