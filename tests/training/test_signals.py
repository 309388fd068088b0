"""What ends a run from outside: SIGKILL, SIGINT once and twice, the death of one of its processes.

Every test goes on with the run afterwards: whatever happened, its records must hold.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from support.live_runs import (
    SMALL,
    Runs,
    actors,
    events,
    resident_bytes,
    surviving,
    trained,
)
from trueup import config as configuration
from trueup.errors import EngineFault, Fault
from trueup.records.audit import audit
from trueup.records.directory import RunDirectory
from trueup.reports.html import write_report
from trueup.training import resume
from trueup.training.progress import Progress
from trueup.training.run import go_on, train

pytestmark = pytest.mark.timeout(300)
"""Room to build the base policy on a busy machine."""

_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

_LONG = (
    "train.steps=50",
    "checkpoint.every=2",
    "environment.latency.median_s=0.02",
    "environment.latency.sigma=0.5",
)
"""Never reaches its end before it is stopped."""

_SCRIPT = """
import sys
from pathlib import Path
from trueup import config
from trueup.training.run import train
path = Path(sys.argv[1])
train(config.load(sys.stdin.read()), path.parent, path.name)
"""
_COMMAND = "import sys; from trueup.cli import main; sys.exit(main(sys.argv[1:]))"


class _Controller:
    """A run whose controller is a process of its own."""

    def __init__(self, process: subprocess.Popen[str], run: Path) -> None:
        self.process = process
        self.run = run
        self.members: list[psutil.Process] = []
        """Every process below it that was seen."""
        self.peak_bytes = 0

    def wait_until(self, happened: Callable[[], bool], timeout_s: float = 240.0) -> None:
        """Poll, and watch the process tree meanwhile."""
        deadline = time.monotonic() + timeout_s
        while not happened():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            self.peak_bytes = max(self.peak_bytes, resident_bytes(self.process.pid))
            self.members = psutil.Process(self.process.pid).children(recursive=True)
            time.sleep(0.02)

    def has_trained(self, step: int) -> bool:
        return RunDirectory(self.run).episode_file(step).exists()

    def demand_nothing_is_left(self, within_s: float = 10.0) -> None:
        assert len(self.members) >= 3
        _, alive = psutil.wait_procs(self.members, timeout=within_s)
        assert alive == []


@contextmanager
def _started(arguments: list[str], run: Path, stdin: str = "") -> Iterator[_Controller]:
    command = [sys.executable, "-c", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(stdin)
        process.stdin.close()
        try:
            yield _Controller(process, run)
        finally:
            process.kill()


def _demand_records_hold(run: RunDirectory, steps: int) -> None:
    """After a resume to the end: no violation, and every step trained once, with draws of its own
    and exactly the episodes that the table holds."""
    assert audit(run) == []
    assert events(run)[-1].payload["reason"] == "done"
    assert [event.payload["step"] for event in surviving(run, "train")] == list(range(steps))
    claims = surviving(run, "claim")
    draw_of = {event.group: event.payload["stream"] for event in events(run, "close")}
    draws = [draw_of[claim.group] for claim in claims]
    assert len(draws) == len(set(draws)) == 4 * steps
    in_table = [(row["step"], row["episode"]) for row in trained(run)]
    claimed = [(claim.payload["step"], e) for claim in claims for e in claim.payload["episodes"]]
    assert sorted(in_table) == sorted(claimed)


# ---- SIGKILL


@pytest.fixture(scope="module")
def killed(
    runs: Runs, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunDirectory, _Controller]:
    """A run whose controller was killed in the middle of a step, in another place since."""
    root = tmp_path_factory.mktemp("killed")
    config = configuration.as_toml(runs.config(*_LONG))
    with _started([_SCRIPT, str(root / "run")], root / "run", config) as controller:
        controller.wait_until(lambda: controller.has_trained(3))
        controller.process.send_signal(signal.SIGKILL)
        controller.process.wait()
    moved = root / "elsewhere" / "run"
    shutil.copytree(root / "run", moved)
    shutil.rmtree(root / "run")
    return RunDirectory.open(moved), controller


@pytest.fixture(scope="module")
def revived(killed: tuple[RunDirectory, _Controller]) -> RunDirectory:
    """That run after it went on to its end."""
    path = killed[0].path.parent / "revived"
    shutil.copytree(killed[0].path, path)
    assert go_on(path, ["train.steps=6"]).status == "done"
    return RunDirectory.open(path)


def test_no_process_outlives_a_killed_controller(
    killed: tuple[RunDirectory, _Controller],
) -> None:
    killed[1].demand_nothing_is_left()


def test_the_processes_of_a_run_fit_into_three_gigabytes(
    killed: tuple[RunDirectory, _Controller],
) -> None:
    assert 0.3e9 < killed[1].peak_bytes < 3e9


def test_the_records_of_a_killed_run_hold_and_make_a_report(
    killed: tuple[RunDirectory, _Controller],
) -> None:
    run, _ = killed
    assert audit(run) == []
    assert "run_end" not in {event.kind for event in events(run)}
    assert write_report(run.path).stat().st_size > 10_000


def test_a_killed_run_goes_on_from_its_newest_checkpoint(
    killed: tuple[RunDirectory, _Controller], revived: RunDirectory
) -> None:
    newest, skipped = resume.newest_valid(killed[0])
    (resumed,) = events(revived, "resume")
    assert not skipped
    assert resumed.payload["path"] == f"checkpoints/{newest.name}"
    assert 2 <= resumed.payload["step"] <= 4
    _demand_records_hold(revived, 6)


def test_a_killed_run_keeps_nothing_of_the_steps_it_repeats(
    killed: tuple[RunDirectory, _Controller], revived: RunDirectory
) -> None:
    (resumed,) = events(revived, "resume")
    repeated = {
        episode
        for claim in events(killed[0], "claim")
        if claim.payload["step"] >= resumed.payload["step"]
        for episode in claim.payload["episodes"]
    }
    assert repeated
    assert repeated.isdisjoint(row["episode"] for row in trained(revived))


def test_engines_of_a_revived_run_are_told_from_their_earlier_lives(revived: RunDirectory) -> None:
    (resumed,) = events(revived, "resume")
    for row in trained(revived):
        epoch = int(row["step"] >= resumed.payload["step"])
        assert {span["epoch"] for span in row["spans"]} == {epoch}


# ---- SIGINT


def _handles(process: subprocess.Popen[str], number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.fixture(scope="module")
def interrupted(
    runs: Runs, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunDirectory, _Controller]:
    """A run of the command line that got SIGINT once."""
    path = tmp_path_factory.mktemp("interrupted") / "run"
    words = ["train", "--run", str(path), f"model.path={runs.base}", *SMALL, *_LONG]
    with _started([_COMMAND, *words], path) as controller:
        controller.wait_until(lambda: controller.has_trained(1))
        controller.process.send_signal(signal.SIGINT)
        controller.process.wait(30)
    return RunDirectory.open(path), controller


def test_an_interrupt_leaves_a_checkpoint_and_exit_code_130(
    interrupted: tuple[RunDirectory, _Controller],
) -> None:
    run, controller = interrupted
    assert controller.process.returncode == 130
    controller.demand_nothing_is_left()
    end = events(run)[-1]
    assert (end.kind, end.payload["reason"]) == ("run_end", "interrupted")
    last = events(run, "train")[-1].payload["step"]
    assert resume.newest_valid(run) == (run.checkpoint(last + 1), [])
    assert audit(run) == []


@_LINUX
def test_a_second_interrupt_ends_at_once_and_loses_no_more_than_a_kill(
    interrupted: tuple[RunDirectory, _Controller], tmp_path: Path
) -> None:
    path = tmp_path / "run"
    shutil.copytree(interrupted[0].path, path)
    first = events(interrupted[0], "checkpoint")[-1].payload["step"]
    with _started([_COMMAND, "train", "--resume", "--run", str(path)], path) as controller:
        controller.wait_until(lambda: controller.has_trained(first + 1))
        controller.process.send_signal(signal.SIGINT)
        while _handles(controller.process, signal.SIGINT):
            time.sleep(0.001)
        controller.process.send_signal(signal.SIGINT)
        controller.process.wait(2)
    assert controller.process.returncode == -signal.SIGINT
    controller.demand_nothing_is_left()
    assert audit(path) == []
    assert go_on(path, [f"train.steps={first + 4}"]).status == "done"
    run = RunDirectory.open(path)
    _demand_records_hold(run, first + 4)
    assert max(span["epoch"] for row in trained(run) for span in row["spans"]) == 2


# ---- the death of a process of the run


@_LINUX
@pytest.mark.parametrize(
    "name",
    [
        "engine-0",
        pytest.param("learner", marks=pytest.mark.slow),
        pytest.param("rollout", marks=pytest.mark.slow),
    ],
)
def test_a_run_stops_with_the_name_of_the_process_it_lost_and_goes_on(
    runs: Runs, tmp_path: Path, name: str
) -> None:
    killed_at: list[float] = []

    def kill(progress: Progress) -> None:
        if progress.step == 2:
            actors(os.getpid())[name].kill()
            killed_at.append(time.monotonic())

    with pytest.raises(Fault) as caught:
        train(runs.config(*_LONG, "checkpoint.every=1"), tmp_path, "run", on_step=kill)
    assert time.monotonic() - killed_at[0] < 10
    assert isinstance(caught.value, EngineFault) == (name == "engine-0")
    assert caught.value.field == name
    assert f"{name} is gone: exit status -9" in caught.value.message
    run = RunDirectory.open(tmp_path / "run")
    end = events(run)[-1]
    assert (end.kind, end.payload["reason"]) == ("run_end", "fault")
    assert end.payload["message"] == caught.value.message
    assert not actors(os.getpid())
    assert audit(run) == []

    assert go_on(run.path, ["train.steps=4"]).status == "done"
    _demand_records_hold(run, 4)
    (resumed,) = events(run, "resume")
    for row in trained(run):
        epoch = int(row["step"] >= resumed.payload["step"])
        assert {span["epoch"] for span in row["spans"]} == {epoch}
