"""The parts of a run as seen from another process: each implements the port of the real one.

Calls go through the clock, which on a logical run decides when their results arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from trueup.errors import TrueupError, from_dict
from trueup.training.clock import DECODE_STEP_S, SYNC_S, TRAIN_STEP_S, Clock
from trueup.training.messages import Consumed, Discarded, EpisodeSpec, ProbeReport, StepReport
from trueup.training.wire import Client
from trueup.types import (
    Activity,
    Completion,
    EngineInfo,
    EpisodeRef,
    FinishReason,
    GenerateRequest,
    LoadReceipt,
    WeightManifest,
)


class RemoteEngine:
    """An engine in its own process."""

    def __init__(self, client: Client) -> None:
        """The client is connected."""
        self._client = client

    async def info(self) -> EngineInfo:
        """See `Engine.info`."""
        info: EngineInfo = await self._client.call("info")
        return info

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`."""
        completion: Completion = await self._client.call("generate", request)
        return completion

    async def release(self, session: str) -> None:
        """See `Engine.release`."""
        await self._client.call("release", session)

    async def load(self, manifest: WeightManifest) -> LoadReceipt:
        """See `Engine.load`."""
        receipt: LoadReceipt = await self._client.call("load", manifest)
        return receipt

    async def activity(self) -> list[Activity]:
        """See `Engine.activity`."""
        return list(await self._client.call("activity"))

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._client.call("close")


class PacedEngine:
    """An engine that decodes a step when logical time grants it one, and not while it loads.

    Requests and releases travel with the next grant, so between which tokens they arrive is decided
    here and not by the speed of a process.
    """

    def __init__(self, client: Client, clock: Clock) -> None:
        """The client is connected; decoding starts with the first request."""
        self._client = client
        self._clock = clock
        self._requests: list[GenerateRequest] = []
        self._released: list[str] = []
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self._work = asyncio.Event()
        self._turn = asyncio.Lock()
        self._pump: asyncio.Task[None] | None = None
        self._lost: TrueupError | None = None

    async def info(self) -> EngineInfo:
        """See `Engine.info`."""
        info: EngineInfo = await self._clock.take(self._client.call("info"), 0)
        return info

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`."""
        if self._lost is not None:
            raise self._lost
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[request.session] = future
        self._requests.append(request)
        self._wake()
        return await future

    async def release(self, session: str) -> None:
        """See `Engine.release`; takes effect before the next decode step."""
        self._released.append(session)
        self._wake()

    async def load(self, manifest: WeightManifest) -> LoadReceipt:
        """See `Engine.load`; nothing is decoded meanwhile."""
        async with self._turn:
            receipt: LoadReceipt = await self._clock.take(
                self._client.call("load", manifest), SYNC_S
            )
        return receipt

    async def activity(self) -> list[Activity]:
        """See `Engine.activity`; one stretch, since where stretches end depends on real time."""
        found: Sequence[Activity] = await self._clock.take(self._client.call("activity"), 0)
        if not found:
            return []
        return [
            Activity(
                t0=found[0].t0,
                t1=found[-1].t1,
                tokens_decoded=sum(a.tokens_decoded for a in found),
                tokens_prefilled=sum(a.tokens_prefilled for a in found),
                steps=sum(a.steps for a in found),
            )
        ]

    async def close(self) -> None:
        """See `Engine.close`."""
        if self._pump is not None:
            self._pump.cancel()
        await self._clock.take(self._client.call("close"), 0)

    def _wake(self) -> None:
        self._work.set()
        if self._pump is None:
            self._pump = asyncio.create_task(self._advance_while_there_is_work())

    async def _advance_while_there_is_work(self) -> None:
        while True:
            await self._work.wait()
            async with self._turn:
                requests, self._requests = self._requests, []
                released, self._released = self._released, []
                try:
                    ended, faults, busy = await self._clock.take(
                        self._client.call("advance", requests, released), DECODE_STEP_S
                    )
                except TrueupError as error:
                    self._lost = error
                    self._fail_all(error)
                    return
            for completion in ended:
                self._deliver(completion)
            for session, record in faults:
                if future := self._waiting.pop(session, None):
                    future.set_exception(from_dict(record))
            if not (busy or self._requests or self._released):
                self._work.clear()

    def _deliver(self, completion: Completion) -> None:
        future = self._waiting.pop(completion.session, None)
        if future is not None and not future.done():
            future.set_result(completion)
        else:
            assert completion.finish is FinishReason.ABORT, "only aborted turns are not awaited"

    def _fail_all(self, error: TrueupError) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()


class RemoteRollout:
    """The rollout worker in its own process."""

    def __init__(self, client: Client) -> None:
        """The client is connected."""
        self._client = client

    async def run(self, spec: EpisodeSpec) -> EpisodeRef:
        """See `Rollout.run`."""
        ref: EpisodeRef = await self._client.call("run", spec)
        return ref

    async def abort(self, episode: str) -> None:
        """See `Rollout.abort`."""
        await self._client.call("abort", episode)

    async def probe(self, engine: int, name: str) -> tuple[str, ...]:
        """See `Rollout.probe`."""
        return tuple(await self._client.call("probe", engine, name))


class RemoteLearner:
    """The learner in its own process."""

    def __init__(self, client: Client, clock: Clock) -> None:
        """The client is connected."""
        self._client = client
        self._clock = clock

    async def publish(self) -> WeightManifest:
        """See `Learner.publish`."""
        manifest: WeightManifest = await self._call("publish", duration_s=SYNC_S)
        return manifest

    async def update(
        self, step: int, consumed: Sequence[Consumed], discarded: Sequence[Discarded]
    ) -> StepReport:
        """See `Learner.update`."""
        report: StepReport = await self._call(
            "update", step, consumed, discarded, duration_s=TRAIN_STEP_S
        )
        return report

    async def probed(self, receipt: LoadReceipt, episodes: Sequence[str]) -> ProbeReport:
        """See `Learner.probed`."""
        report: ProbeReport = await self._call("probed", receipt, tuple(episodes))
        return report

    async def record(self, step: int, discarded: Sequence[Discarded]) -> None:
        """See `Learner.record`."""
        await self._call("record", step, discarded)

    async def checkpoint(self, step: int, state: dict[str, Any]) -> tuple[str, str]:
        """See `Learner.checkpoint`."""
        path, digest = await self._call("checkpoint", step, state)
        return path, digest

    async def retire(self, version: int) -> None:
        """See `Learner.retire`."""
        await self._call("retire", version)

    async def close(self) -> None:
        """See `Learner.close`."""
        await self._call("close")

    async def _call(self, method: str, *arguments: Any, duration_s: float = 0.0) -> Any:
        return await self._clock.take(self._client.call(method, *arguments), duration_s)


def run_blocking_on(clock: Clock) -> Callable[[Callable[[], Any]], Any]:
    """How an environment's blocking calls are run in a process that lives on a clock."""

    def run_blocking(call: Callable[[], Any]) -> Any:
        return clock.take(asyncio.get_running_loop().run_in_executor(None, call), 0)

    return run_blocking
