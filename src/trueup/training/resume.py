"""Where a run that stopped goes on: read from its checkpoints and its ledger.

The newest checkpoint that verifies is taken; what was skipped is said. Nothing here loads tensors.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueup.errors import CheckpointError
from trueup.models.directory import verify
from trueup.records.directory import RunDirectory
from trueup.records.ledger import Ledger
from trueup.training.ports import Start

STATE = "state.json"
"""The controller's state in a checkpoint."""
_PARTS = {"step", "version", "stream"}
"""What a run cannot go on without."""


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
    path, skipped = newest_valid(run)
    state = read_state(path)
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


def newest_valid(run: RunDirectory) -> tuple[Path, list[tuple[str, str]]]:
    """The newest checkpoint that verifies, and (name, reason) of those that were skipped.

    Raises:
        CheckpointError: There is none.
    """
    skipped: list[tuple[str, str]] = []
    for path in sorted(run.checkpoints.glob("step-*"), reverse=True):
        try:
            if not verify(path):
                raise CheckpointError(field=path.name, rule="with a manifest", value="none")
            read_state(path)
        except CheckpointError as error:
            skipped.append((path.name, error.message))
            continue
        return path, skipped
    raise CheckpointError(
        field="checkpoints", rule="at least one that verifies", value=skipped or "none"
    )


def read_state(directory: Path) -> dict[str, Any]:
    """The controller's state of a checkpoint.

    Raises:
        CheckpointError: It is missing or malformed.
    """
    try:
        state = json.loads((directory / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            field=f"{directory.name}/{STATE}", rule="readable JSON", value=str(error)
        ) from None
    if not isinstance(state, dict) or not state.keys() >= _PARTS:
        raise CheckpointError(
            field=f"{directory.name}/{STATE}",
            rule=f"an object of {', '.join(sorted(_PARTS))}",
            value=state,
        )
    return state
