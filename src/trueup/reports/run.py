"""Loads what a run left behind; a killed, unfinished or damaged run loads as far as it goes.

Whatever could not be read is named in `Records.notes`, so that a report never looks complete when
it is not.
"""

from __future__ import annotations

import json
import math
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trueup.config import Config
from trueup.config import load as load_config
from trueup.diagnostics.metrics import Metric
from trueup.errors import ConfigError, RunDirectoryError
from trueup.records.directory import RunDirectory
from trueup.records.ledger import Ledger
from trueup.records.schema import Event
from trueup.records.tables import VersionRow
from trueup.reports.history import History
from trueup.reports.history import read as read_history


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Everything but the tokens, which are read file by file."""

    path: Path
    history: History = field(default_factory=History)
    config: Config | None = None
    metrics: dict[str, dict[int, Metric]] = field(default_factory=dict)
    """Name -> step -> value."""
    versions: tuple[VersionRow, ...] = ()
    manifest: dict[str, Any] = field(default_factory=dict)
    """Code, versions, hardware, seeds."""
    notes: tuple[str, ...] = ()
    """What is missing or unreadable, one sentence each."""

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.resolve().name

    def events(self, *kinds: str) -> list[Event]:
        """All events of some kinds, in order."""
        return list(self.history.events(*kinds))

    def series(self, metric: str) -> tuple[list[float], list[float | None]]:
        """Steps and means of one metric."""
        rows = sorted(self.metrics.get(metric, {}).items())
        return [float(step) for step, _ in rows], [_finite(m.mean) for _, m in rows]


def read_run(run_dir: Path) -> Records:
    """Load a run directory.

    Raises:
        RunDirectoryError: `run_dir` is no directory.
    """
    if not run_dir.is_dir():
        raise RunDirectoryError(field="run", rule="an existing directory", value=str(run_dir))
    notes: list[str] = []
    directory = RunDirectory(run_dir)
    config = _config(directory.config, notes)
    if not directory.ledger.is_file():
        notes.append(f"There is no ledger ({directory.ledger.name}): the run never started.")
        return Records(path=run_dir, config=config, notes=tuple(notes))
    with closing(Ledger.open(directory.ledger, readonly=True)) as ledger:
        history = read_history(ledger.events())
        metrics: dict[str, dict[int, Metric]] = {}
        for row in ledger.metrics():
            metric = Metric(sum=row.sum, count=row.count, min=row.min, max=row.max)
            metrics.setdefault(row.name, {})[row.step] = metric
        versions = tuple(ledger.versions())
    if not any(e.kind == "run_end" for e in (history.sessions or [[]])[-1]):
        notes.append("The run has not ended: it is still going on, or it was killed.")
    return Records(
        path=run_dir,
        history=history,
        config=config,
        metrics=metrics,
        versions=versions,
        manifest=_manifest(directory.manifest),
        notes=tuple(notes),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _manifest(path: Path) -> dict[str, Any]:
    """What produced the run; empty if it says nothing readable."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _config(path: Path, notes: list[str]) -> Config | None:
    try:
        return load_config(path.read_text(encoding="utf-8"), source=path.name)
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        notes.append(f"The configuration could not be read: {error}")
        return None
