"""The asynchronous face of the embedded core, free-running or paced.

Free-running, a background task steps the core while there is work and yields to the event loop
between steps, so that requests, releases and swaps get in at token boundaries. Paced, nothing is
decoded unless `advance` grants it: a driver on a logical clock then decides between which tokens a
request or a new version arrives, and a run can be repeated exactly.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import torch

from trueup.config import EngineConfig
from trueup.engines.embedded.core import EmbeddedCore
from trueup.engines.embedded.weights import Digest, Fetch
from trueup.errors import EngineFault
from trueup.types import (
    Activity,
    Completion,
    EngineInfo,
    GenerateRequest,
    LoadReceipt,
    WeightManifest,
)


class EmbeddedEngine:
    """Implements `engines.base.Engine` in this process.

    Args:
        core: What computes; owned by this engine from now on.
        paced: Decode only when `advance` is called.
    """

    def __init__(self, core: EmbeddedCore, *, paced: bool = False) -> None:
        """Start empty; the first `load` makes it serve."""
        self._core = core
        self._paced = paced
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self._aborted: list[Completion] = []
        self._pump: asyncio.Task[None] | None = None
        self._loading = asyncio.Lock()
        self._fault: EngineFault | None = None
        self._closed = False

    async def info(self) -> EngineInfo:
        """See `Engine.info`."""
        return EngineInfo(
            engine=self._core.engine_id,
            epoch=self._core.epoch,
            kind="embedded",
            precision=self._core.precision,
            slots=self._core.slots,
            version=self._core.version,
            pid=os.getpid(),
            forces=True,
        )

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`; cancelling it releases the session."""
        self._demand_mode(paced=False)
        self._core.submit(request)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[request.session] = future
        self._wake()
        try:
            return await future
        except asyncio.CancelledError:
            self._waiting.pop(request.session, None)
            self._core.release(request.session)
            self._wake()
            raise

    async def submit(self, request: GenerateRequest) -> None:
        """Paced mode: queue one turn, which `advance` will return when it ended.

        Raises:
            EngineFault: As `generate`; or the engine is not paced.
        """
        self._demand_mode(paced=True)
        self._core.submit(request)

    async def advance(self, steps: int) -> list[Completion]:
        """Paced mode: decode up to so many tokens of every session.

        Args:
            steps: Granted steps; fewer are taken when there is nothing left to decode.

        Returns:
            The turns that ended or were aborted since the last call, in order. Sessions that failed
            are in `take_faults`.

        Raises:
            EngineFault: Closed, or the engine is not paced.
        """
        self._demand_mode(paced=True)
        ended, self._aborted = self._aborted, []
        for _ in range(steps):
            if not self._core.busy:
                break
            ended += self._core.step()
        return ended

    @property
    def busy(self) -> bool:
        """Whether a further step would do something."""
        return self._core.busy

    async def take_faults(self) -> list[tuple[str, EngineFault]]:
        """Paced mode: sessions that failed since the last call, with their fault."""
        return self._core.take_faults()

    async def release(self, session: str) -> None:
        """See `Engine.release`."""
        self._deliver([self._core.release(session)])
        self._wake()

    async def load(self, manifest: WeightManifest) -> LoadReceipt:
        """See `Engine.load`; staging runs in a thread while decoding goes on."""
        async with self._loading:
            self._demand_open()
            t_start = time.monotonic()
            digest = await asyncio.to_thread(self._core.stage, manifest)
            t_staged = time.monotonic()
            self._demand_open()
            t_swap = time.monotonic()
            recomputed = self._core.swap()
            t_end = time.monotonic()
            return LoadReceipt(
                engine=self._core.engine_id,
                epoch=self._core.epoch,
                version=manifest.version,
                digest=digest,
                t_start=t_start,
                t_staged=t_staged,
                t_end=t_end,
                tokens_recomputed=recomputed,
                prepare_s=self._core.prepare_s,
                pause_s=t_end - t_swap,
            )

    async def attest(self) -> str:
        """Digest of the memory that is served now, computed from that memory.

        Raises:
            EngineFault: Nothing is served yet, or closed.
        """
        async with self._loading:
            self._demand_open()
            return await asyncio.to_thread(self._core.attest)

    async def activity(self) -> list[Activity]:
        """See `Engine.activity`."""
        return self._core.meter.drain()

    async def close(self) -> None:
        """See `Engine.close`; may be called twice."""
        if self._closed:
            return
        self._closed = True
        self._fault = self._fault or EngineFault(field="engine", rule="open", value="closed")
        async with self._loading:
            self._deliver(self._core.close())
        if self._pump is not None:
            await asyncio.wait([self._pump])

    def _wake(self) -> None:
        """Have the core stepped while there is work."""
        if self._paced or not self._core.busy:
            return
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
            self._pump.add_done_callback(self._stopped)

    async def _run(self) -> None:
        while self._core.busy:
            self._deliver(self._core.step())
            for session, fault in self._core.take_faults():
                future = self._waiting.pop(session)
                if not future.cancelled():
                    future.set_exception(fault)
            await asyncio.sleep(0)

    def _stopped(self, pump: asyncio.Task[None]) -> None:
        """A step that raised ends every generation with that fault, and the engine."""
        error = None if pump.cancelled() else pump.exception()
        if error is None:
            return
        self._fault = EngineFault(field="engine", rule="decoding", value=repr(error))
        self._fault.__cause__ = error
        for future in self._waiting.values():
            if not future.cancelled():
                future.set_exception(self._fault)
        self._waiting.clear()

    def _deliver(self, ended: list[Completion] | list[Completion | None]) -> None:
        for completion in ended:
            if completion is None:
                continue
            if self._paced:
                self._aborted.append(completion)
                continue
            future = self._waiting.pop(completion.session)
            if not future.cancelled():
                future.set_result(completion)

    def _demand_open(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _demand_mode(self, *, paced: bool) -> None:
        self._demand_open()
        if paced is not self._paced:
            raise EngineFault(
                field="engine",
                rule="paced for submit and advance, free-running for generate",
                value="paced" if self._paced else "free-running",
            )


def build(
    config: EngineConfig,
    *,
    model: Path,
    engine_id: str,
    epoch: int,
    fetch: Fetch,
    digest: Digest,
    paced: bool,
) -> EmbeddedEngine:
    """See `engines.table.Build`."""
    torch.set_num_threads(config.threads)
    core = EmbeddedCore(
        model,
        engine_id=engine_id,
        epoch=epoch,
        slots=config.slots,
        dtype=config.dtype,
        quantize=config.quantize,
        float32_head=config.float32_head,
        kv_mode=config.kv_mode,
        prefix_cache=config.prefix_cache,
        fetch=fetch,
        digest=digest,
    )
    return EmbeddedEngine(core, paced=paced)
