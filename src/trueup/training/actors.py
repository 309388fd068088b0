"""The processes of a run: each builds one part from the configuration and serves it.

Started as `python -m trueup.training.actors`; what to be is one JSON object on the first line of
stdin. A process lives as long as the other end of its stdin, so that none outlives the controller,
however that ends. SIGINT and SIGTERM, which reach the whole group, are the controller's to handle.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trueup import config as configuration
from trueup.config import Config
from trueup.engines.base import Engine
from trueup.errors import EngineFault, TrueupError
from trueup.records.directory import RunDirectory
from trueup.training.payload import PayloadStore
from trueup.training.remote import RemoteEngine
from trueup.training.resume import STATE
from trueup.training.rollout import Rollout
from trueup.training.wire import Client, Service, serve
from trueup.types import GenerateRequest, LoadReceipt, WeightManifest

_CONNECT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class ActorSpec:
    """What a process is to be."""

    kind: str
    """`engine`, `learner` or `rollout`."""
    name: str
    config: str
    """TOML."""
    run: str
    """Run directory."""
    sockets: str
    """Private directory of the run's sockets."""
    model: str
    """Directory of the policy: architecture, tokenizer, and the weights to start from."""
    index: int = 0
    epoch: int = 0
    version: int = 0
    paced: bool = False

    @property
    def socket(self) -> Path:
        """Where this process listens."""
        return Path(self.sockets) / f"{self.name}.sock"

    def line(self) -> bytes:
        """What the process reads on stdin."""
        return json.dumps(asdict(self)).encode() + b"\n"


async def rollout_of(
    config: Config,
    run: RunDirectory,
    model: Path,
    engines: list[Engine],
    run_blocking: Callable[[Callable[[], Any]], Any] | None = None,
) -> Rollout:
    """Build the rollout worker: environment workers, renderer, payload store."""
    from trueup.environments.table import open_environment
    from trueup.environments.worker import EnvWorkers
    from trueup.models.chat import Renderer
    from trueup.training.probe import ProbeSet

    workers = EnvWorkers(
        open_environment(config),
        threads=config.environment.workers,
        deadline_s=2 * config.environment.deadline_s + 5,
        latency=config.environment.latency,
        seed=config.seed,
        run_blocking=run_blocking,
    )
    return Rollout(
        engines,
        lambda spec: workers.worker(spec.task, seed=spec.key[1], episode=spec.id),
        Renderer.load(model),
        PayloadStore(run.path),
        max_turns=config.environment.max_turns,
        max_tokens=config.engine.max_tokens,
        probes=ProbeSet.load(config, model),
    )


class EngineService:
    """An engine as others may call it, free-running or paced."""

    exposed = ("info", "generate", "release", "load", "activity", "close", "advance")

    def __init__(self, engine: Any) -> None:
        """Hold the engine and hand its own methods out."""
        self._engine = engine
        self.info = engine.info
        self.generate = engine.generate
        self.release = engine.release
        self.activity = engine.activity
        self.close = engine.close

    async def load(self, manifest: WeightManifest) -> LoadReceipt:
        """See `Engine.load`."""
        receipt: LoadReceipt = await self._engine.load(manifest)
        return receipt

    async def advance(
        self, requests: tuple[GenerateRequest, ...], released: tuple[str, ...]
    ) -> tuple[Any, Any, bool]:
        """Take in what arrived, then decode one step.

        Returns:
            Turns that ended, (session, error) of those that failed, and whether any still decodes.
        """
        faults: list[tuple[str, TrueupError]] = []
        for session in released:
            await self._engine.release(session)
        for request in requests:
            try:
                await self._engine.submit(request)
            except EngineFault as error:
                faults.append((request.session, error))
        ended = await self._engine.advance(1)
        faults += await self._engine.take_faults()
        return (
            ended,
            [(session, error.as_dict()) for session, error in faults],
            self._engine.busy,
        )


def _engine(spec: ActorSpec, config: Config) -> Service:
    from trueup.engines.table import factory
    from trueup.sync.digest import digest
    from trueup.sync.table import build

    engine = factory(config.engine.kind)(
        config.engine,
        model=Path(spec.model),
        engine_id=spec.name,
        epoch=spec.epoch,
        fetch=build(config.sync, Path(spec.run)).fetch,
        digest=digest,
        paced=spec.paced,
    )
    return EngineService(engine)


def _learner(spec: ActorSpec, config: Config) -> Service:
    import torch

    from trueup.models.load import load_model
    from trueup.sync.table import build
    from trueup.training import checkpoint
    from trueup.training.learner import Learner
    from trueup.training.trainer import TorchTrainer
    from trueup.training.version_scores import versions_needed

    torch.set_num_threads(config.train.threads)
    model = Path(spec.model)
    resumed = (model / STATE).exists()
    policy, moments = checkpoint.load(model) if resumed else (load_model(model), {})
    trainer = TorchTrainer(
        policy,
        config.train,
        temperature=config.engine.temperature,
        seed=config.seed,
        version=spec.version,
        keep_versions=versions_needed(config),
        reference=checkpoint.load_reference(model) if resumed and config.train.kl_beta else None,
    )
    checkpoint.restore_optimizer(policy, trainer.optimizer, moments)
    run = RunDirectory.open(Path(spec.run))
    transport = build(config.sync, run.path)
    return Learner(
        config,
        run,
        trainer,
        PayloadStore(run.path),
        publish=transport.publish,
        retire=transport.retire,
        close=transport.close,
        tokenizer_files_from=model,
    )


async def _rollout(spec: ActorSpec, config: Config) -> Service:
    engines: list[Engine] = []
    for index in range(config.engine.count):
        client = Client(f"engine-{index}", fault=EngineFault)
        path = Path(spec.sockets) / f"engine-{index}.sock"
        await asyncio.to_thread(client.wait_for, path, _CONNECT_S)
        await client.connect(path)
        engines.append(RemoteEngine(client))
    run = RunDirectory.open(Path(spec.run))
    return await rollout_of(config, run, Path(spec.model), engines)


async def _serve(spec: ActorSpec) -> None:
    orphaned = asyncio.create_task(_stdin_closed())
    orphaned.add_done_callback(lambda _: os._exit(0))
    config = configuration.load(spec.config)
    builders: dict[str, Callable[[], Service | Coroutine[Any, Any, Service]]] = {
        "engine": lambda: _engine(spec, config),
        "learner": lambda: _learner(spec, config),
        "rollout": lambda: _rollout(spec, config),
    }
    built = builders[spec.kind]()
    service = await built if isinstance(built, Coroutine) else built
    async with await serve(spec.socket, service):
        await orphaned


async def _stdin_closed() -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(1024):
        pass


def main() -> None:
    """Be what stdin says."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.raw.readline()  # type: ignore[union-attr]
    asyncio.run(_serve(ActorSpec(**json.loads(line))))


if __name__ == "__main__":
    main()
