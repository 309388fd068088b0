"""Whole runs with real processes: small ones, made once and shared, and what is read from them."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from trueup import config as configuration
from trueup.config import Config
from trueup.records.directory import RunDirectory
from trueup.records.ledger import Ledger
from trueup.records.schema import Event
from trueup.records.tables import MetricRow
from trueup.records.tokens import read_steps
from trueup.training.run import train

SMALL = (
    "train.groups_per_step=4",
    "train.samples_per_group=4",
    "engine.slots=16",
    "eval.samples=0",
)


@dataclass(frozen=True)
class Runs:
    """Runs of one test session, shared by its workers.

    A run that several tests only read is made by whoever asks first; the others wait for it.
    """

    root: Path
    base: Path
    """The base policy."""

    def config(self, *overrides: str) -> Config:
        return configuration.load("", [f'model.path="{self.base}"', *SMALL, *overrides])

    def finished(self, name: str, *overrides: str) -> RunDirectory:
        """A run of a configuration to its end. Nobody may change its directory."""
        done = self.root / f"{name}.done"
        with locked(self.root / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(self.root / name, ignore_errors=True)
                assert train(self.config(*overrides), self.root, name).status == "done"
                done.touch()
        return RunDirectory.open(self.root / name)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file's lock against the other workers."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def events(run: RunDirectory, *kinds: str) -> list[Event]:
    ledger = Ledger.open(run.ledger, readonly=True)
    try:
        return list(ledger.events(kinds or None))
    finally:
        ledger.close()


def digests(run: RunDirectory) -> dict[int, str]:
    """Digest of each published version."""
    ledger = Ledger.open(run.ledger, readonly=True)
    try:
        return {row.version: row.digest for row in ledger.versions()}
    finally:
        ledger.close()


def metrics(run: RunDirectory) -> dict[tuple[int, str], MetricRow]:
    """Metrics by step and name."""
    ledger = Ledger.open(run.ledger, readonly=True)
    try:
        return {(row.step, row.name): row for row in ledger.metrics()}
    finally:
        ledger.close()


def rows(run: RunDirectory) -> list[dict[str, Any]]:
    """The episode table, steps and episodes in the order in which they were consumed."""
    found: list[dict[str, Any]] = read_steps(run).to_pylist()
    return found


def trained(run: RunDirectory) -> list[dict[str, Any]]:
    """The rows of episodes that a step consumed."""
    return [row for row in rows(run) if row["reason"] is None]


def versions_of(row: dict[str, Any]) -> list[int]:
    """Version of each action token."""
    return [s["version"] for s in row["spans"] for _ in range(s["stop"] - s["start"])]


def lags_of(row: dict[str, Any]) -> list[int]:
    """Lag of each action token."""
    pairs = zip(row["lag_in_flight"], row["lag_in_queue"], strict=True)
    return [flight + queue for flight, queue in pairs]


def surviving(run: RunDirectory, kind: str) -> list[Event]:
    """Rows of a kind with a step, without those that a resume has superseded."""
    found: list[Event] = []
    for event in events(run, kind, "resume"):
        if event.kind == "resume":
            found = [row for row in found if row.payload["step"] < event.payload["step"]]
        else:
            found.append(event)
    return found


def actors(controller: int) -> dict[str, psutil.Process]:
    """The processes of a run by name, which is that of the log that they write to."""
    found = {}
    for process in psutil.Process(controller).children():
        log = Path(f"/proc/{process.pid}/fd/1").resolve()
        if log.suffix == ".log":
            found[log.stem] = process
    return found


def resident_bytes(controller: int) -> int:
    """Memory of a process and all below it; shared pages count once per process."""
    tree = psutil.Process(controller)
    total = 0
    for process in (tree, *tree.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def last_checkpoint(run: RunDirectory) -> Path:
    return max(run.checkpoints.glob("step-*"))


_TIMES = frozenset(
    ("t0", "t1", "t_submit", "t_start", "t_staged", "t_end", "prepare_s", "pause_s", "phases")
)


def without_times(event: Event) -> tuple[Any, ...]:
    """All that a row of the ledger says, but for what a clock has said and the chain over it."""
    payload = {key: value for key, value in event.payload.items() if key not in _TIMES}
    if event.kind == "activity":
        payload["stretches"] = [stretch[2:] for stretch in payload["stretches"]]
    columns = (event.seq, event.actor, event.actor_seq, event.kind, event.episode)
    return (*columns, event.attempt, event.group, event.version, event.engine, payload)
