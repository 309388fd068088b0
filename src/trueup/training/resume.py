"""Where a run that stopped goes on: read from its checkpoints and its ledger."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from trueup.records.directory import RunDirectory
from trueup.records.ledger import Ledger
from trueup.training import checkpoint
from trueup.training.controller import Start


@dataclass(frozen=True, kw_only=True)
class Found:
    """A place to go on from."""

    start: Start
    model: Path
    """The checkpoint."""
    epoch: int
    """How often the engines of this run had been started."""


def find(run: RunDirectory) -> Found:
    """The newest checkpoint that verifies, and what the ledger says was left behind.

    Groups that were started and neither trained nor dropped are given up; their draws are issued
    again, because the task stream resumes from its low-water mark.

    Raises:
        CheckpointError: No checkpoint verifies.
    """
    path, skipped = checkpoint.newest_valid(run)
    state = checkpoint.read_state(path)
    attempts: dict[int, list[str]] = defaultdict(list)
    settled: set[int] = set()
    highest, lives = -1, 0
    ledger = Ledger.open(run.ledger, readonly=True)
    for event in ledger.events(("run_start", "resume", "issue", "claim", "drop")):
        match event.kind:
            case "issue":
                attempts[event.group].append(event.episode)
                highest = max(highest, event.group)
            case "claim" | "drop":
                settled.add(event.group)
            case _:
                lives += 1
    ledger.close()
    open_groups = sorted(set(attempts) - settled)
    return Found(
        start=Start(
            step=state["step"],
            version=state["version"],
            group=highest + 1,
            stream=state["stream"],
            resumed_from=str(path.relative_to(run.path)),
            skipped=tuple(skipped),
            abandoned=tuple((group, tuple(attempts[group])) for group in open_groups),
        ),
        model=path,
        epoch=lives,
    )
