"""Where the parts of a run live on one machine: a process each, joined by sockets.

On real time the rollout worker is a process too. On logical time it lives in the controller's
process, because its order of events is what has to be repeatable, and the engines are paced.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from trueup.config import TINY_AGENT, Config, as_toml
from trueup.engines.base import Engine
from trueup.errors import EngineFault, Fault
from trueup.models import catalog
from trueup.records.directory import RunDirectory
from trueup.training.actors import ActorSpec, rollout_of
from trueup.training.clock import Clock
from trueup.training.ports import LearnerPort, RolloutPort
from trueup.training.remote import (
    PacedEngine,
    RemoteEngine,
    RemoteLearner,
    RemoteRollout,
    run_blocking_on,
)
from trueup.training.wire import Client

_READY_S = 300.0
_OWN_MAPPING_BYTES = 1 << 20
"""What is larger goes back to the system when it is freed (glibc). Left to itself the threshold
rises to 32 MiB and the heap is fragmented: five steps of a policy of 135 million parameters peaked
at 8.4 GB, all processes together, against 7.8 with this."""
_CLOSE_S = 3.0
"""For all processes together to end by themselves."""


class LocalRuntime:
    """Starts the processes of a run and ends them.

    Args:
        config: The run.
        run: Its directory; every process logs into it.
        model: Policy to start from.
        version: Version of that policy.
        epoch: How often the engines of this run had been started before.
        clock: Real or logical.
        on_gone: Told when a process ends that should not.
    """

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        model: Path,
        *,
        version: int,
        epoch: int,
        clock: Clock,
        on_gone: Callable[[Fault], None],
    ) -> None:
        """Nothing is started yet."""
        self._config = config
        self._run = run
        self._model = model
        self._version = version
        self._epoch = epoch
        self._clock = clock
        self._on_gone = on_gone
        self._sockets = Path(tempfile.mkdtemp(prefix="trueup-"))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: list[IO[bytes]] = []
        self._clients: list[Client] = []
        self._closing = False
        self.engines: list[Engine] = []
        self.rollout: RolloutPort
        self.learner: LearnerPort
        self._learner: RemoteLearner | None = None

    async def start(self) -> None:
        """Start every process and wait until all answer.

        Raises:
            Fault: One ended before it was ready; its log is quoted.
        """
        names = [f"engine-{index}" for index in range(self._config.engine.count)]
        self._launch("learner", "learner")
        for index, name in enumerate(names):
            self._launch("engine", name, index)
        if not self._clock.logical:
            self._launch("rollout", "rollout")
        self._learner = RemoteLearner(await self._connect("learner", Fault), self._clock)
        self.learner = self._learner
        for name in names:
            client = await self._connect(name, EngineFault)
            paced = self._clock.logical
            self.engines.append(PacedEngine(client, self._clock) if paced else RemoteEngine(client))
        if self._clock.logical:
            self.rollout = await rollout_of(
                self._config, self._run, self._model, self.engines, run_blocking_on(self._clock)
            )
        else:
            self.rollout = RemoteRollout(await self._connect("rollout", Fault))

    async def close(self) -> None:
        """End every process: politely, then by force."""
        self._closing = True
        if self._learner is not None:
            with contextlib.suppress(Fault):
                await self._learner.close()
        for client in self._clients:
            await client.close()
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        await self._clock.take(asyncio.to_thread(self._reap), 0)
        for log in self._logs:
            log.close()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _reap(self) -> None:
        deadline = time.monotonic() + _CLOSE_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _launch(self, kind: str, name: str, index: int = 0) -> None:
        spec = ActorSpec(
            kind=kind,
            name=name,
            config=as_toml(self._config),
            run=str(self._run.path),
            sockets=str(self._sockets),
            model=str(self._model),
            index=index,
            epoch=self._epoch,
            version=self._version,
            paced=self._clock.logical,
        )
        log = self._run.log(name).open("ab")
        self._logs.append(log)
        threads = {"engine": self._config.engine.threads, "learner": self._config.train.threads}
        process = subprocess.Popen(
            [sys.executable, "-m", "trueup.training.actors"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={
                **os.environ,
                "OMP_NUM_THREADS": str(threads.get(kind, 1)),
                # Threads that spin while they wait starve the other processes of a small machine.
                "OMP_WAIT_POLICY": "PASSIVE",
                "TOKENIZERS_PARALLELISM": "false",
                "HF_HUB_OFFLINE": "1",
                "MALLOC_MMAP_THRESHOLD_": str(_OWN_MAPPING_BYTES),
            },
        )
        assert process.stdin is not None
        process.stdin.write(spec.line())
        process.stdin.flush()
        self._processes[name] = process

    async def _connect(self, name: str, fault: type[Fault]) -> Client:
        client = Client(
            name,
            why_ended=lambda wait_s: self._why_ended(name, wait_s),
            fault=fault,
            on_gone=self._hung_up,
        )
        self._clients.append(client)
        path = self._sockets / f"{name}.sock"
        await self._clock.take(asyncio.to_thread(client.wait_for, path, _READY_S), 0)
        await client.connect(path)
        return client

    def _hung_up(self, fault: Fault) -> None:
        if not self._closing:
            self._on_gone(fault)

    def _why_ended(self, name: str, wait_s: float) -> str:
        """Exit status and last words of a process, or "" if it lives."""
        try:
            status = self._processes[name].wait(wait_s)
        except subprocess.TimeoutExpired:
            return ""
        lines = self._run.log(name).read_text(errors="replace").strip().splitlines()
        return f"exit status {status}; {lines[-1] if lines else 'it said nothing'}"


def base_model(config: Config) -> Path:
    """The policy that a run starts from; one that has to be made is, in a process of its own.

    Raises:
        CheckpointError: `model.path` is neither a name nor a directory.
        Fault: That process failed.
    """
    path = config.model.path
    maker = ["trueup.training.base_policy"]
    if path != TINY_AGENT:
        found = catalog.find(path)
        if found is not None:
            return found
        maker = ["trueup.models.catalog", path]
    result = subprocess.run(
        [sys.executable, "-m", *maker],
        input=as_toml(config).encode(),
        capture_output=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if result.returncode:
        raise Fault(f"the base policy could not be made: {result.stderr.decode()}", field="model")
    return Path(result.stdout.decode().strip())
