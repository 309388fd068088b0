"""The ledger of a run: one SQLite file, one writer, rows chained by a hash.

Every row's `chain` hashes the row and the chain of the row before; `head` names the last row, in
the same transaction. An altered, deleted or inserted row therefore breaks the chain
(`chain.verify`), which guards against accident and carelessness, not against somebody who rewrites
the whole file.

`append` only buffers: a row is durable against the death of the process after the next `flush`, and
against the loss of power after `flush(durable=True)`. What a killed controller had not flushed is
gone, so the file is always a prefix of what happened.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trueup.errors import DataError, RunDirectoryError
from trueup.records import chain
from trueup.records.files import on_network
from trueup.records.schema import KINDS, Event
from trueup.records.tables import FORMAT, TABLES, MetricLike, MetricRow, StepRow, VersionRow

_BUFFERED_ROWS = 512
"""Rows after which `append` flushes by itself."""

_COLUMNS = ", ".join(chain.COLUMNS)
_INSERT = f"INSERT INTO events({_COLUMNS}) VALUES ({', '.join('?' * len(chain.COLUMNS))})"
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class Ledger:
    """Appends and reads the rows of one run; use `create` or `open`.

    Args:
        connection: Open database with the tables.
        clock: Monotonic time in seconds, for rows that are appended without one.
        wall: Time since the epoch in seconds, for display only.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._db = connection
        self._clock, self._wall = clock, wall
        self._rows: list[tuple[Any, ...]] = []
        self._seq: int
        self._seq, head = connection.execute("SELECT seq, chain FROM head").fetchone()
        self._chain = bytes.fromhex(head)
        self._actor_seq: dict[str, int] = dict(
            connection.execute("SELECT actor, MAX(actor_seq) FROM events GROUP BY actor")
        )

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> Ledger:
        """Make a new ledger.

        Warns:
            RuntimeWarning: The path is on a network file system: slower, rollback journal.

        Raises:
            RunDirectoryError: The file exists, or its directory does not.
        """
        if path.exists() or not path.parent.is_dir():
            raise RunDirectoryError(field="ledger", rule="a new file", value=str(path))
        connection = _connect(path, readonly=False)
        connection.executescript(f"BEGIN; {TABLES} PRAGMA user_version = {FORMAT}; COMMIT;")
        return cls(connection, clock=clock, wall=wall)

    @classmethod
    def open(
        cls,
        path: Path,
        readonly: bool = False,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> Ledger:
        """Open an existing ledger; appending continues after the last committed row.

        Raises:
            RunDirectoryError: Missing, not a ledger, or of another format.
        """
        if not path.is_file():
            raise RunDirectoryError(field="ledger", rule="an existing file", value=str(path))
        connection = _connect(path, readonly=readonly)
        try:
            (found,) = connection.execute("PRAGMA user_version").fetchone()
            if found != FORMAT:
                raise _not_a_ledger(path, f"format {found}")
            return cls(connection, clock=clock, wall=wall)
        except (sqlite3.DatabaseError, TypeError, ValueError) as error:
            connection.close()
            if isinstance(error, RunDirectoryError):
                raise
            raise _not_a_ledger(path, str(error)) from None

    # ---- writing

    def append(
        self,
        kind: str,
        *,
        actor: str,
        episode: str = "",
        attempt: int = -1,
        group: int = -1,
        version: int = -1,
        engine: str = "",
        payload: Mapping[str, Any] | None = None,
        t_mono: float | None = None,
    ) -> int:
        """Buffer one row (columns as in `schema`); `flush` commits it.

        Returns:
            Its `seq`.

        Raises:
            DataError: Unknown kind, or a payload that is not JSON with finite numbers.
        """
        if kind not in KINDS:
            raise DataError(field="kind", rule=f"one of {', '.join(KINDS)}", value=kind)
        try:
            text = _encode(payload) if payload else "{}"
        except (TypeError, ValueError) as error:
            rule = f"JSON with finite numbers ({error})"
            raise DataError(field=f"{kind}.payload", rule=rule, value=payload) from None
        # SQLite does not keep the sign of a zero.
        now = (self._clock() if t_mono is None else t_mono) + 0.0
        seq = self._seq + 1
        actor_seq = self._actor_seq.get(actor, 0) + 1
        row = (
            *(seq, actor, actor_seq, now, self._wall() + 0.0, kind),
            *(episode, attempt, group, version, engine, text),
        )
        digest = chain.link(self._chain, row)
        self._rows.append((*row, digest.hex()))
        self._seq, self._actor_seq[actor], self._chain = seq, actor_seq, digest
        if len(self._rows) >= _BUFFERED_ROWS:
            self.flush()
        return seq

    def flush(self, *, durable: bool = False) -> None:
        """Commit what is buffered.

        Args:
            durable: Also force it to the disk, so that it survives a loss of power.

        Raises:
            sqlite3.OperationalError: The disk is full or refuses; the rows stay buffered, and the
                next flush tries again.
        """
        if self._rows:
            with self._transaction():
                self._db.executemany(_INSERT, self._rows)
                head = (self._seq, self._chain.hex())
                self._db.execute("UPDATE head SET seq = ?, chain = ?", head)
            self._rows.clear()
        if durable:
            # Does nothing with a rollback journal, where every commit is forced.
            self._db.execute("PRAGMA wal_checkpoint(FULL)")

    def record_version(self, row: VersionRow) -> None:
        """Note a published version; a version published again after a resume replaces the old."""
        values = (row.version, row.digest, row.n_changed, row.nbytes)
        self.flush()
        self._db.execute("INSERT OR REPLACE INTO versions VALUES (?, ?, ?, ?)", values)

    def record_step(self, row: StepRow) -> None:
        """Note a trained step; a step trained again after a resume replaces the old."""
        values = (row.step, row.version, row.episodes, row.tokens, row.t0, row.t1)
        self.flush()
        self._db.execute("INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?, ?)", values)

    def record_metrics(
        self,
        step: int,
        metrics: Mapping[str, MetricLike],
        sketches: Mapping[str, bytes] | None = None,
    ) -> None:
        """Note metrics of a step, replacing those of the same name."""
        sketches = sketches or {}
        rows = [
            (step, name, m.sum, m.count, m.min, m.max, sketches.get(name))
            for name, m in metrics.items()
        ]
        self.flush()
        statement = "INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?, ?, ?, ?)"
        with self._transaction():
            self._db.executemany(statement, rows)

    def close(self) -> None:
        """Commit and close; closes even if the commit fails, see `flush`."""
        try:
            self.flush()
        finally:
            self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN")
        try:
            yield
            self._db.execute("COMMIT")
        finally:
            # SQLite itself rolls back after some errors, not after all.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    # ---- reading

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Within it, all reads see the file as it was at one moment, whatever a writer does."""
        self.flush()
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute("COMMIT")

    def events(self, kinds: Collection[str] | None = None, after: int = 0) -> Iterator[Event]:
        """Rows in order.

        Args:
            kinds: Only these; all if None.
            after: Only rows with a larger `seq`.

        Raises:
            DataError: A payload that is not a JSON object.
        """
        self.flush()
        query = f"SELECT {_COLUMNS} FROM events WHERE seq > ?"
        if kinds is not None:
            query += f" AND kind IN ({', '.join('?' * len(kinds))})"
        for row in self._db.execute(query + " ORDER BY seq", (after, *(kinds or ()))):
            yield _event(row)

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """The rows of `events` as they are stored, columns as in `chain.COLUMNS`."""
        self.flush()
        yield from self._db.execute(f"SELECT {_COLUMNS} FROM events ORDER BY seq")

    def head(self) -> tuple[int, str]:
        """`seq` and `chain` of the last row, as committed beside it."""
        self.flush()
        seq, digest = self._db.execute("SELECT seq, chain FROM head").fetchone()
        return seq, digest

    def metrics(self) -> Iterator[MetricRow]:
        """Metrics by step and name."""
        for step, name, *values, sketch in self._db.execute(
            "SELECT step, name, sum, count, min, max, sketch FROM metrics ORDER BY step, name"
        ):
            # SQLite stores NaN as NULL.
            total, count, low, high = (math.nan if value is None else value for value in values)
            yield MetricRow(
                step=step, name=name, sum=total, count=count, min=low, max=high, sketch=sketch
            )

    def versions(self) -> Iterator[VersionRow]:
        """Published versions in order."""
        for version, digest, n_changed, nbytes in self._db.execute(
            "SELECT version, digest, n_changed, nbytes FROM versions ORDER BY version"
        ):
            yield VersionRow(version=version, digest=digest, n_changed=n_changed, nbytes=nbytes)

    def steps(self) -> Iterator[StepRow]:
        """Trained steps in order."""
        for step, version, episodes, tokens, t0, t1 in self._db.execute(
            "SELECT step, version, episodes, tokens, t0, t1 FROM steps ORDER BY step"
        ):
            yield StepRow(
                step=step, version=version, episodes=episodes, tokens=tokens, t0=t0, t1=t1
            )


def _connect(path: Path, *, readonly: bool) -> sqlite3.Connection:
    mode = "ro" if readonly else "rwc"
    connection = sqlite3.connect(
        f"{path.resolve().as_uri()}?mode={mode}", uri=True, isolation_level=None, timeout=10
    )
    if readonly:
        return connection
    journal, synchronous = "WAL", "NORMAL"
    if on_network(path):
        journal, synchronous = "DELETE", "FULL"
        warnings.warn(
            f"{path} is on a network file system: the ledger uses a rollback journal, not WAL",
            RuntimeWarning,
            stacklevel=3,
        )
    try:
        connection.execute(f"PRAGMA journal_mode = {journal}")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
    except sqlite3.DatabaseError as error:
        connection.close()
        raise _not_a_ledger(path, str(error)) from None
    return connection


def _not_a_ledger(path: Path, why: str) -> RunDirectoryError:
    message = f"{path} must be a ledger of format {FORMAT}: {why}"
    return RunDirectoryError(message, field="ledger", rule="a ledger", value=why)


def _event(row: tuple[Any, ...]) -> Event:
    seq, actor, actor_seq, t_mono, t_wall, kind = row[:6]
    episode, attempt, group, version, engine, text, digest = row[6:]
    try:
        payload = json.loads(text)
    except (TypeError, ValueError):
        payload = None
    if not isinstance(payload, dict):
        raise DataError(field=f"payload of row {seq}", rule="a JSON object", value=text)
    return Event(
        seq=seq,
        actor=actor,
        actor_seq=actor_seq,
        t_mono=t_mono,
        t_wall=t_wall,
        kind=kind,
        episode=episode,
        attempt=attempt,
        group=group,
        version=version,
        engine=engine,
        payload=payload,
        chain=digest,
    )
