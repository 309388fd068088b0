import math
import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trueup.errors import DataError, RunDirectoryError
from trueup.records import chain, ledger
from trueup.records.ledger import Ledger
from trueup.records.tables import StepRow, VersionRow


def fill(book, n=5):
    for i in range(n):
        book.append(
            "issue",
            actor=f"engine-{i % 2}",
            episode=f"e{i}",
            attempt=0,
            group=i,
            version=3,
            engine=f"engine-{i % 2}",
            payload={"task": "t", "slot": i, "score": 0.1 * i, "text": "ä\n\x1b"},
        )


def breaks(path):
    book = Ledger.open(path, readonly=True)
    try:
        return list(chain.verify(book.rows(), book.head()))
    finally:
        book.close()


def alter(path, statement, *values):
    db = sqlite3.connect(path)
    with db:
        db.execute(statement, values)
    db.close()


def test_rows_come_back_as_they_were_appended(tmp_path):
    ticks = iter(range(100))
    book = Ledger.create(tmp_path / "run.db", clock=lambda: float(next(ticks)), wall=lambda: 7.0)
    assert book.append("run_start", actor="controller", payload={"schedule": {"staleness": 2}}) == 1
    assert book.append("publish", actor="trainer", version=0, t_mono=0.5) == 2
    assert book.append("run_end", actor="controller") == 3
    start, publish, end = book.events()
    assert (start.seq, start.actor, start.actor_seq, start.t_mono) == (1, "controller", 1, 0.0)
    assert start.payload == {"schedule": {"staleness": 2}}
    assert (start.episode, start.attempt, start.group, start.version) == ("", -1, -1, -1)
    assert (publish.actor_seq, publish.version, publish.t_mono, publish.t_wall) == (1, 0, 0.5, 7.0)
    assert (end.actor_seq, end.payload) == (2, {})
    assert [e.seq for e in book.events(kinds=["publish", "run_end"], after=2)] == [3]
    book.close()


def test_an_injected_clock_makes_two_ledgers_identical(tmp_path):
    for name in ("a", "b"):
        book = Ledger.create(tmp_path / name, clock=lambda: 1.0, wall=lambda: 2.0)
        fill(book)
        book.close()
    books = [Ledger.open(tmp_path / name) for name in ("a", "b")]
    assert list(books[0].rows()) == list(books[1].rows())
    for book in books:
        book.close()


@pytest.mark.parametrize("payload", [{"x": math.nan}, {"x": math.inf}, {"x": {1, 2}}])
def test_a_payload_that_is_not_json_is_refused_and_leaves_no_gap(tmp_path, payload):
    book = Ledger.create(tmp_path / "run.db")
    with pytest.raises(DataError, match=r"issue\.payload must be JSON with finite numbers"):
        book.append("issue", actor="controller", payload=payload)
    with pytest.raises(DataError, match="kind must be one of"):
        book.append("isue", actor="controller")
    assert book.append("tick", actor="controller") == 1
    book.close()
    assert breaks(tmp_path / "run.db") == []


def test_opening_continues_the_sequence_and_the_chain(tmp_path):
    path = tmp_path / "run.db"
    book = Ledger.create(path)
    fill(book, 3)
    book.close()
    book = Ledger.open(path)
    assert book.append("tick", actor="engine-0") == 4
    book.close()
    book = Ledger.open(path, readonly=True)
    assert [(e.actor, e.actor_seq) for e in book.events()] == [
        ("engine-0", 1),
        ("engine-1", 1),
        ("engine-0", 2),
        ("engine-0", 3),
    ]
    book.close()
    assert breaks(path) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from trueup.records.ledger import Ledger
book = Ledger.create(Path(sys.argv[1]))
for i in range(100):
    book.append("tick", actor="controller", payload={"i": i})
    if i == 59:
        book.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_a_kill_the_ledger_is_the_prefix_up_to_the_last_flush(tmp_path):
    path = tmp_path / "run.db"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)])
    assert done.returncode == -signal.SIGKILL
    book = Ledger.open(path)
    assert [e.payload["i"] for e in book.events()] == list(range(60))
    assert book.append("resume", actor="controller") == 61
    book.close()
    assert breaks(path) == []


def test_a_full_buffer_is_committed_without_being_asked(tmp_path):
    path = tmp_path / "run.db"
    book = Ledger.create(path)
    for _ in range(600):
        book.append("tick", actor="controller")
    reader = Ledger.open(path, readonly=True)
    assert reader.head()[0] == 512
    book.flush(durable=True)
    assert reader.head()[0] == 600
    reader.close()
    book.close()


def test_readonly_refuses_to_write(tmp_path):
    path = tmp_path / "run.db"
    Ledger.create(path).close()
    book = Ledger.open(path, readonly=True)
    book.append("tick", actor="controller")
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        book.flush()
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        book.close()


def test_rows_that_a_full_disk_refused_are_committed_once_there_is_room(tmp_path):
    path = tmp_path / "run.db"
    book = Ledger.create(path)
    (pages,) = book._db.execute("PRAGMA page_count").fetchone()
    book._db.execute(f"PRAGMA max_page_count = {pages}")
    book.append("tick", actor="controller", payload={"text": "x" * 100_000})
    for _ in range(2):
        with pytest.raises(sqlite3.OperationalError, match="full"):
            book.flush()
    book._db.execute("PRAGMA max_page_count = 100000")
    book.append("tick", actor="controller")
    book.close()
    book = Ledger.open(path)
    assert [event.seq for event in book.events()] == [1, 2]
    book.close()
    assert breaks(path) == []


def test_what_is_not_a_ledger_is_refused(tmp_path):
    (tmp_path / "text").write_text("not a database, and long enough to be taken for one" * 50)
    sqlite3.connect(tmp_path / "other.db").close()
    alter(tmp_path / "other.db", "CREATE TABLE events(seq)")
    for name in ("missing", "text", "other.db"):
        with pytest.raises(RunDirectoryError, match="ledger"):
            Ledger.open(tmp_path / name)
    with pytest.raises(RunDirectoryError, match="new file"):
        Ledger.create(tmp_path / "text")


def test_a_network_disk_gets_a_rollback_journal_and_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "on_network", lambda path: True)
    path = tmp_path / "run.db"
    with pytest.warns(RuntimeWarning, match="network file system"):
        book = Ledger.create(path)
    fill(book)
    book.flush(durable=True)
    assert not path.with_name("run.db-wal").exists()
    book.close()
    assert breaks(path) == []


def test_a_local_disk_gets_wal(tmp_path):
    book = Ledger.create(tmp_path / "run.db")
    fill(book)
    book.flush()
    assert (tmp_path / "run.db-wal").exists()
    book.close()
    assert sorted(os.listdir(tmp_path)) == ["run.db"]


def test_attempts_are_derived_from_issue_and_finish(tmp_path):
    book = Ledger.create(tmp_path / "run.db")
    fill(book, 2)
    verdict = {"status": "done", "reward": 1.0, "tokens": 9, "action_tokens": 4}
    book.append("finish", actor="controller", episode="e1", attempt=0, group=1, payload=verdict)
    book.close()
    db = sqlite3.connect(tmp_path / "run.db")
    query = "SELECT episode, task, version_issued, status, reward FROM attempts ORDER BY episode"
    assert db.execute(query).fetchall() == [
        ("e0", "t", 3, None, None),
        ("e1", "t", 3, "done", 1.0),
    ]
    db.close()


@dataclass
class Stat:
    sum: float
    count: float
    min: float
    max: float


def test_versions_steps_and_metrics_are_kept_and_replaced_after_a_resume(tmp_path):
    book = Ledger.create(tmp_path / "run.db")
    version = VersionRow(version=1, digest="ab", n_changed=10, nbytes=80)
    again = VersionRow(version=1, digest="cd", n_changed=11, nbytes=80)
    book.record_version(version)
    book.record_version(again)
    step = StepRow(step=0, version=1, episodes=64, tokens=1000, t0=0.5, t1=1.5)
    book.record_step(step)
    book.record_metrics(0, {"gap/k1": Stat(1.0, 4, -1.0, 2.0), "gap/k3": Stat(1, 1, 1, 1)})
    book.record_metrics(0, {"gap/k3": Stat(math.nan, 2, -math.inf, 3.0)}, {"gap/k3": b"\x01"})
    assert list(book.versions()) == [again]
    assert list(book.steps()) == [step]
    k1, k3 = book.metrics()
    assert (k1.step, k1.name, k1.sum, k1.count, k1.min, k1.max) == (0, "gap/k1", 1, 4, -1, 2)
    assert math.isnan(k3.sum)
    assert (k3.count, k3.min, k3.max, k3.sketch) == (2, -math.inf, 3, b"\x01")
    book.close()


# ---- the chain

NUMBERS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))
VALUES = st.one_of(NUMBERS, st.text(max_size=20), st.binary(max_size=20))


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seq=st.integers(1, 5),
    column=st.sampled_from(chain.COLUMNS),
    value=VALUES,
)
def test_every_change_of_one_column_of_one_row_breaks_the_chain(tmp_path, seq, column, value):
    path = tmp_path / "run.db"
    path.unlink(missing_ok=True)
    book = Ledger.create(path, clock=lambda: 1.5, wall=lambda: 2.5)
    fill(book)
    before = list(book.rows())
    book.close()
    try:
        alter(path, f"UPDATE OR IGNORE events SET {column} = ? WHERE seq = ?", value, seq)
    except sqlite3.IntegrityError:
        return  # SQLite itself refuses, e.g. text as a primary key
    try:
        book = Ledger.open(path, readonly=True)
        after = list(book.rows())
        book.close()
    except (RunDirectoryError, sqlite3.OperationalError):
        return  # unreadable is found
    assert (after == before) == (breaks(path) == [])


def test_an_altered_row_is_named_once(tmp_path):
    path = tmp_path / "run.db"
    book = Ledger.create(path)
    fill(book)
    book.close()
    alter(path, "UPDATE events SET payload = replace(payload, '\"t\"', '\"u\"') WHERE seq = 3")
    (found,) = breaks(path)
    assert found == (3, "row 3 does not hash to its chain: it or its predecessor was altered")


@pytest.mark.parametrize("seq", [1, 3, 5])
def test_a_deleted_row_is_found_even_at_the_end(tmp_path, seq):
    path = tmp_path / "run.db"
    book = Ledger.create(path)
    fill(book)
    book.close()
    alter(path, "DELETE FROM events WHERE seq = ?", seq)
    assert any("missing" in message for _, message in breaks(path))


def test_an_inserted_row_is_found(tmp_path):
    path = tmp_path / "run.db"
    book = Ledger.create(path)
    fill(book)
    book.close()
    names = ", ".join(chain.COLUMNS)
    rest = ", ".join(chain.COLUMNS[1:])
    alter(path, f"INSERT INTO events({names}) SELECT 6, {rest} FROM events WHERE seq = 5")
    assert len(breaks(path)) == 3  # actor_seq, hash, head


def test_swapped_rows_are_found(tmp_path):
    path = tmp_path / "run.db"
    book = Ledger.create(path)
    fill(book)
    book.close()
    for statement in ("-2 WHERE seq = 2", "2 WHERE seq = 3", "3 WHERE seq = -2"):
        alter(path, f"UPDATE events SET seq = {statement}")
    assert breaks(path)
