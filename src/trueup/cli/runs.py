"""Where runs lie: the next free name, the newest run, a path as it is typed."""

from __future__ import annotations

from pathlib import Path

from trueup.errors import RunDirectoryError
from trueup.records.directory import RunDirectory

RUNS = Path("runs")
"""Directory of all runs, unless `--run` names another."""


def planned(path: Path | None, stem: str) -> RunDirectory:
    """The directory that a new run would get; nothing is made.

    Raises:
        RunDirectoryError: The name is not allowed, or taken.
    """
    if path is None:
        return RunDirectory.planned(RUNS, f"{stem}-{_next_number(stem)}")
    return RunDirectory.planned(path.parent, path.name)


def newest() -> RunDirectory:
    """The run whose ledger was written last.

    Raises:
        RunDirectoryError: There is none.
    """
    ledgers = list(RUNS.glob("*/run.db"))
    if not ledgers:
        raise RunDirectoryError(
            f"there is no run in {RUNS}/; name one with --run",
            field="run",
            rule="an existing run",
            value=str(RUNS),
        )
    return RunDirectory.open(max(ledgers, key=lambda path: path.stat().st_mtime).parent)


def shown(path: Path) -> Path:
    """A path as the user would type it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _next_number(stem: str) -> int:
    taken = (path.name.removeprefix(f"{stem}-") for path in RUNS.glob(f"{stem}-*"))
    return 1 + max((int(number) for number in taken if number.isdecimal()), default=0)
