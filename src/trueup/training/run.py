"""A run from beginning to end: check, prepare, start the processes, control, close.

Everything that can be refused is refused before anything is written. A run directory has one
controller at a time. A resumed run takes the newest checkpoint that verifies.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trueup import config as configuration
from trueup.config import Config
from trueup.errors import Fault
from trueup.records.directory import RunDirectory
from trueup.records.files import write_atomic
from trueup.records.ledger import Ledger
from trueup.records.lock import RunLock
from trueup.records.manifest import build_manifest, write_manifest
from trueup.training import preflight
from trueup.training.clock import LogicalClock, RealClock
from trueup.training.clock import run as run_on_clock
from trueup.training.controller import Controller
from trueup.training.payload import clear
from trueup.training.ports import Start
from trueup.training.progress import Progress
from trueup.training.recorder import Recorder
from trueup.training.runtime_local import LocalRuntime, base_model

_SIGNALS = {signal.SIGINT: "SIGINT", signal.SIGTERM: "SIGTERM"}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended, if no fault ended it."""

    status: str
    """`done` or `interrupted`."""
    signal: str = ""
    """What interrupted it."""


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    config: Config
    run: RunDirectory
    model: Path
    start: Start
    epoch: int
    world: preflight.World


def train(
    config: Config,
    root: Path,
    name: str,
    *,
    on_step: Callable[[Progress], None] = lambda progress: None,
    command: Sequence[str] | None = None,
) -> Outcome:
    """Run a configuration in a new run directory.

    Args:
        config: What to run.
        root: Directory of all runs.
        name: Name of this one.
        on_step: Told after every step.
        command: What the user typed, for the manifest.

    Raises:
        UsageError: Something is wrong that the user can mend; nothing was written.
        Fault: A part failed while running; the ledger holds the first cause.
    """
    world = preflight.check(config)
    model = base_model(config)
    run = RunDirectory.create(root, name)
    with RunLock(run.lock):
        write_atomic(run.config, configuration.as_toml(config).encode())
        manifest = build_manifest(seeds={"run": config.seed}, command=command)
        write_manifest(run.manifest, {**manifest, "model": model.name})
        ledger = Ledger.create(run.ledger)
        prepared = _Prepared(
            config=config,
            run=run,
            model=model,
            start=Start(),
            epoch=0,
            world=world,
        )
        return _control(prepared, ledger, on_step)


def go_on(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    on_step: Callable[[Progress], None] = lambda progress: None,
) -> Outcome:
    """Resume a run from its newest valid checkpoint.

    Args:
        path: The run directory.
        overrides: Changes to its configuration, e.g. more steps.
        on_step: Told after every step.

    Raises:
        UsageError: The directory holds no run, is in use, or has no valid checkpoint.
        Fault: A part failed while running.
    """
    run = RunDirectory.open(path)
    config = configuration.load(run.config.read_text(), overrides, source=str(run.config))
    with RunLock(run.lock):
        world, found = preflight.check_resume(run, config)
        write_atomic(run.config, configuration.as_toml(config).encode())
        prepared = _Prepared(
            config=config,
            run=run,
            model=found.model,
            start=found.start,
            epoch=found.epoch,
            world=world,
        )
        return _control(prepared, Ledger.open(run.ledger), on_step)


def _control(prepared: _Prepared, ledger: Ledger, on_step: Callable[[Progress], None]) -> Outcome:
    logical = prepared.config.train.deterministic
    clear(prepared.run.path)
    try:
        return run_on_clock(_run(prepared, ledger, on_step, logical), logical=logical)
    finally:
        ledger.close()
        clear(prepared.run.path)


async def _run(
    prepared: _Prepared, ledger: Ledger, on_step: Callable[[Progress], None], logical: bool
) -> Outcome:
    clock = LogicalClock() if logical else RealClock()
    lost: list[Fault] = []
    controller: Controller | None = None

    def gone(fault: Fault) -> None:
        lost.append(fault)
        if controller is not None:
            controller.fail(fault)

    runtime = LocalRuntime(
        prepared.config,
        prepared.run,
        prepared.model,
        version=prepared.start.version,
        epoch=prepared.epoch,
        clock=clock,
        on_gone=gone,
    )
    try:
        await runtime.start()
        controller = Controller(
            prepared.config,
            Recorder(ledger),
            engines=runtime.engines,
            rollout=runtime.rollout,
            learner=runtime.learner,
            tasks=prepared.world.tasks,
            heldout=prepared.world.heldout,
            start=prepared.start,
            on_step=on_step,
        )
        for fault in lost:
            controller.fail(fault)
        received = _handle_signals(controller)
        status = await controller.run()
        return Outcome(status=status, signal=received[0] if received else "")
    finally:
        await runtime.close()


def _handle_signals(controller: Controller) -> list[str]:
    """The first signal asks for a checkpoint, the second ends the process at once."""
    loop = asyncio.get_running_loop()
    received: list[str] = []

    def handle(number: signal.Signals) -> None:
        received.append(_SIGNALS[number])
        controller.interrupt(f"{_SIGNALS[number]}")
        for other in _SIGNALS:
            loop.remove_signal_handler(other)
            signal.signal(other, signal.SIG_DFL)

    for number in _SIGNALS:
        with suppress(ValueError, RuntimeError):  # only the main thread may handle signals
            loop.add_signal_handler(number, handle, number)
    return received
