import json
from pathlib import Path
from typing import Any

import pytest

from trueup.errors import CheckpointError
from trueup.models.directory import MANIFEST, publish
from trueup.records.directory import RunDirectory
from trueup.records.ledger import Ledger
from trueup.training.resume import STATE, find, read_state

WEIGHTS = "model.safetensors"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory.create(tmp_path, "run")
    Ledger.create(directory.ledger).close()
    return directory


def add(run: RunDirectory, kind: str, **columns: Any) -> None:
    ledger = Ledger.open(run.ledger)
    ledger.append(kind, actor="controller", **columns)
    ledger.close()


def issue(run: RunDirectory, group: int, *episodes: str) -> None:
    for episode in episodes:
        add(run, "issue", group=group, episode=episode)


def checkpoint(run: RunDirectory, step: int, **changes: Any) -> Path:
    """Whole, and as large as it has to be to be told apart."""
    state = {
        "step": step,
        "version": step,
        "stream": {"low_water": 2 * step, "committed": [2 * step + 1]},
        **changes,
    }
    with publish(run.checkpoint(step)) as work:
        (work / STATE).write_text(json.dumps(state))
        (work / WEIGHTS).write_bytes(bytes(100))
    return run.checkpoint(step)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_the_newest_checkpoint_is_taken_with_all_it_says(run: RunDirectory):
    for step in (2, 9, 10):
        checkpoint(run, step, version=step - 1)
    found = find(run)
    assert found.model == run.checkpoint(10)
    assert (found.start.step, found.start.version) == (10, 9)
    assert found.start.stream == {"low_water": 20, "committed": [21]}
    assert found.start.resumed_from == "checkpoints/step-000010"
    assert found.start.skipped == ()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: flip(path / WEIGHTS), WEIGHTS),
        (lambda path: truncate(path / WEIGHTS), WEIGHTS),
        (lambda path: (path / WEIGHTS).unlink(), WEIGHTS),
        (lambda path: truncate(path / STATE), STATE),
        (lambda path: (path / MANIFEST).unlink(), "manifest"),
        (lambda path: (path / MANIFEST).write_text("{}"), MANIFEST),
        (lambda path: (path / MANIFEST).write_text("not JSON"), MANIFEST),
    ],
    ids=["flipped", "cut", "missing", "state cut", "unsealed", "empty seal", "no seal"],
)
def test_a_damaged_checkpoint_is_skipped_for_the_one_before_and_named(
    run: RunDirectory, damage, reason: str
):
    checkpoint(run, 2)
    damage(checkpoint(run, 4))
    found = find(run)
    assert found.model == run.checkpoint(2)
    ((name, why),) = found.start.skipped
    assert name == "step-000004"
    assert reason in why


def test_all_that_was_skipped_is_said_newest_first(run: RunDirectory):
    for step in (1, 2, 3, 4):
        checkpoint(run, step)
    for step in (2, 3, 4):
        flip(run.checkpoint(step) / WEIGHTS)
    found = find(run)
    assert found.start.step == 1
    assert [name for name, _ in found.start.skipped] == [
        "step-000004",
        "step-000003",
        "step-000002",
    ]


def test_what_is_still_being_written_is_no_checkpoint(run: RunDirectory):
    checkpoint(run, 2)
    (run.checkpoints / ".step-000004.abc").mkdir()
    found = find(run)
    assert (found.start.step, found.start.skipped) == (2, ())


@pytest.mark.parametrize("damaged", [0, 2])
def test_a_run_without_a_whole_checkpoint_cannot_go_on(run: RunDirectory, damaged: int):
    for step in range(1, damaged + 1):
        flip(checkpoint(run, step) / WEIGHTS)
    with pytest.raises(CheckpointError, match="at least one that verifies") as caught:
        find(run)
    assert ("step-000001" in caught.value.message) == bool(damaged)


def test_a_state_that_is_sealed_but_lacks_a_part_is_skipped(run: RunDirectory):
    checkpoint(run, 1)
    with publish(run.checkpoint(2)) as work:
        (work / STATE).write_text(json.dumps({"step": 2}))
    found = find(run)
    assert found.start.step == 1
    ((name, why),) = found.start.skipped
    assert name == "step-000002"
    assert "version" in why


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": 1, "version": 1}', "7"])
def test_a_state_that_nobody_can_go_on_from_is_refused(tmp_path: Path, text: str):
    (tmp_path / STATE).write_text(text)
    with pytest.raises(CheckpointError, match=STATE):
        read_state(tmp_path)


def test_groups_that_were_neither_trained_nor_dropped_are_given_up(run: RunDirectory):
    checkpoint(run, 1)
    issue(run, 0, "a0", "a1")
    issue(run, 1, "b0", "b1")
    issue(run, 2, "c0")
    add(run, "claim", group=0)
    issue(run, 3, "d0", "d1")
    issue(run, 2, "c1")
    add(run, "drop", group=1)
    found = find(run)
    assert found.start.abandoned == ((2, ("c0", "c1")), (3, ("d0", "d1")))
    assert found.start.group == 4


def test_group_ids_go_on_behind_all_that_were_ever_used(run: RunDirectory):
    checkpoint(run, 1)
    issue(run, 17, "z")
    add(run, "claim", group=17)
    assert find(run).start.group == 18


def test_a_run_that_never_issued_starts_with_group_0(run: RunDirectory):
    checkpoint(run, 1)
    assert find(run).start.group == 0


def test_each_life_gets_an_epoch_of_its_own(run: RunDirectory):
    checkpoint(run, 1)
    for life, kind in enumerate(["run_start", "resume", "resume"]):
        add(run, kind, payload={})
        assert find(run).epoch == life + 1
