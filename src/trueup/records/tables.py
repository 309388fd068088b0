"""The ledger's tables: their SQL, and the rows of those beside `events`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

FORMAT = 1
"""Version of the tables, kept as the database's `user_version`."""

TABLES = """
CREATE TABLE events(
    seq INTEGER PRIMARY KEY, actor TEXT NOT NULL, actor_seq INTEGER NOT NULL,
    t_mono REAL NOT NULL, t_wall REAL NOT NULL, kind TEXT NOT NULL, episode TEXT NOT NULL,
    attempt INTEGER NOT NULL, grp INTEGER NOT NULL, version INTEGER NOT NULL,
    engine TEXT NOT NULL, payload TEXT NOT NULL, chain TEXT NOT NULL);
CREATE INDEX events_by_kind ON events(kind);
CREATE TABLE head(id INTEGER PRIMARY KEY CHECK (id = 1), seq INTEGER NOT NULL, chain TEXT NOT NULL);
INSERT INTO head VALUES (1, 0, '');
CREATE TABLE versions(
    version INTEGER PRIMARY KEY, digest TEXT NOT NULL, n_changed INTEGER NOT NULL,
    nbytes INTEGER NOT NULL);
CREATE TABLE steps(
    step INTEGER PRIMARY KEY, version INTEGER NOT NULL, episodes INTEGER NOT NULL,
    tokens INTEGER NOT NULL, t0 REAL NOT NULL, t1 REAL NOT NULL);
CREATE TABLE metrics(
    step INTEGER NOT NULL, name TEXT NOT NULL, sum REAL, count REAL, min REAL, max REAL,
    sketch BLOB, PRIMARY KEY (step, name)) WITHOUT ROWID;
-- Derived, so that it cannot disagree with the events.
CREATE VIEW attempts AS SELECT
    i.episode, i.attempt, i.grp, json_extract(i.payload, '$.task') AS task,
    json_extract(i.payload, '$.member') AS member, i.engine, i.version AS version_issued,
    json_extract(f.payload, '$.status') AS status, json_extract(f.payload, '$.reward') AS reward,
    json_extract(f.payload, '$.tokens') AS tokens,
    json_extract(f.payload, '$.action_tokens') AS action_tokens,
    i.t_mono AS t_issued, f.t_mono AS t_finished
FROM (SELECT * FROM events WHERE kind = 'issue') i
LEFT JOIN (SELECT * FROM events WHERE kind = 'finish') f USING (episode, attempt);
"""


class MetricLike(Protocol):
    """A mergeable statistic (`diagnostics.metrics.Metric`)."""

    @property
    def sum(self) -> float:
        """Sum of the values."""

    @property
    def count(self) -> float:
        """How many."""

    @property
    def min(self) -> float:
        """Smallest."""

    @property
    def max(self) -> float:
        """Largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """A metric of one step, mergeable."""

    step: int
    name: str
    sum: float
    count: float
    min: float
    max: float
    sketch: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRow:
    """A published version."""

    version: int
    digest: str
    n_changed: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """A trained step; times on the monotonic clock."""

    step: int
    version: int
    """The version it produced."""
    episodes: int
    tokens: int
    """Action tokens trained."""
    t0: float
    t1: float
