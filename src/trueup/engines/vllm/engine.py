"""vLLM behind the `Engine` port: spans from its own labels, updates that cannot mix weights.

An update is staged and verified while decoding goes on; then the scheduler pauses, the weights are
replaced, the caches are dealt with and decoding goes on. A version that does not verify is refused
before the pause and the old one is served as the old one. If anything fails between pause and
resume, nobody can know what is in the engine's memory: it is fenced, and refuses everything.

Two of vLLM's habits shape this file. Its prefix cache survives an update, and cannot be reset while
running turns keep their blocks: so every request carries its version as the salt of the cache, and
no prefix of another version is ever found. And it answers a turn at its end: so the labels in the
response, not what is known here at some moment, say where a turn changed versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trueup.engines.requests import demand_sound
from trueup.engines.vllm import wire
from trueup.engines.vllm.asking import body
from trueup.engines.vllm.client import Client
from trueup.engines.vllm.facts import ServerFacts, check_server
from trueup.engines.vllm.reply import Reply, read
from trueup.engines.vllm.turns import Session, provenance
from trueup.engines.vllm.update import stage, swap
from trueup.errors import EngineFault, TransportFault
from trueup.types import (
    Activity,
    Completion,
    EngineInfo,
    GenerateRequest,
    LoadReceipt,
    Span,
    WeightManifest,
)

PauseMode = Literal["keep", "wait", "abort"]

_CLOSE_S = 5.0
"""For aborted turns to come back."""
_LEAST_TEMPERATURE = 0.01
"""vLLM silently raises what lies below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """What the adapter is told, beside the server's own facts."""

    engine_id: str
    epoch: int
    precision: str
    """What spans name, e.g. `bfloat16+int8`."""
    quantize: Literal["none", "int8"] = "none"
    """What workers do to a version before they load it."""
    kv_mode: Literal["recompute", "keep"] = "recompute"
    pause: PauseMode = "keep"
    """What happens to running turns at an update: go on, end first, or be aborted."""
    expected: Mapping[str, tuple[int, ...]] | None = None
    """Name -> shape of every tensor a version must have; None: as vLLM accepts them."""


@dataclass(slots=True)
class _Turn:
    """A turn in flight."""

    id: str
    task: asyncio.Task[Mapping[str, Any]]


class VllmEngine:
    """Implements `engines.base.Engine` over a vLLM server.

    Args:
        client: How to reach it.
        options: What it is to be.
        kill: Ends the server, whatever state it is in; for one started elsewhere, does nothing.
        pid: Of the server, if it is our own.
        watch_s: Between two questions whether the engine's loop still turns, while turns run.
    """

    def __init__(
        self,
        client: Client,
        options: VllmOptions,
        *,
        kill: Callable[[], None] = lambda: None,
        pid: int | None = None,
        watch_s: float = 5.0,
    ) -> None:
        """Start empty; the first `load` makes it serve."""
        self._client = client
        self._options = options
        self._kill = kill
        self._pid = pid
        self._watch_s = watch_s
        self._facts: ServerFacts | None = None
        self._version = -1
        self._salt = ""
        self._vocab_size = 0
        self._fault: EngineFault | None = None
        self._sessions: dict[str, Session] = {}
        self._turns: dict[str, _Turn] = {}
        self._activity: list[Activity] = []
        self._loading = asyncio.Lock()
        self._connecting = asyncio.Lock()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._watch: asyncio.Task[None] | None = None

    async def info(self) -> EngineInfo:
        """See `Engine.info`."""
        facts = await self._connect()
        return EngineInfo(
            engine=self._options.engine_id,
            epoch=self._options.epoch,
            kind="vllm",
            precision=self._options.precision,
            slots=facts.slots,
            version=self._version,
            pid=self._pid or os.getpid(),
            forces=wire.PROCESSOR in facts.processors,
            cache_block=facts.cache_block,
        )

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`; cancelling it aborts the turn.

        Raises:
            EngineFault: As the port says; and where the response lacks an id, a log-prob or a
                version, or the server died or went silent.
        """
        t_submit = time.monotonic()
        facts = await self._connect()
        await self._resumed.wait()  # else the salt of the cache would name the version before
        self._demand_serving()
        self._demand_possible(request, facts)
        name = request.session
        if name in self._turns:
            raise EngineFault(
                field=f"session {name}", rule="without a turn in progress", value=name
            )
        session = self._sessions.setdefault(name, Session())
        sent_at = self._version
        turn_id = uuid.uuid4().hex
        asked = body(turn_id, request, salt=self._salt)
        turn = _Turn(turn_id, asyncio.create_task(self._ask(asked)))
        self._turns[name] = turn
        self._keep_watch()
        try:
            response = await asyncio.shield(turn.task)
        except asyncio.CancelledError:
            if turn.task.cancelled():  # not by the caller: the engine failed
                self._demand_open()
            turn.task.add_done_callback(_retrieved)
            await self._abort(turn)
            raise
        finally:
            del self._turns[name]
        if self._sessions.get(name) is not session:
            session = Session()  # released meanwhile: nothing of it is known any more
        return self._completion(request, read(response, request), session, sent_at, t_submit)

    async def release(self, session: str) -> None:
        """See `Engine.release`."""
        self._sessions.pop(session, None)
        if session in self._turns:
            await self._abort(self._turns[session])

    async def load(self, manifest: WeightManifest) -> LoadReceipt:
        """See `Engine.load`.

        Raises:
            TransportFault: The version did not verify; the old one is served as before.
            EngineFault: The update failed between pause and resume; the engine is fenced.
        """
        async with self._loading:
            await self._connect()
            self._demand_open()
            self._check_tensors(manifest)
            t_start = time.monotonic()
            staged = await stage(self._client, manifest, self._options.quantize)
            t_staged = time.monotonic()
            self._demand_open()
            async with self._paused():
                recomputed = await swap(
                    self._client,
                    manifest.version,
                    running=[turn.id for turn in self._turns.values()],
                    keep=self._options.kv_mode == "keep",
                )
                self._version = manifest.version
                self._salt = f"{manifest.version}-{manifest.digest}"
            t_end = time.monotonic()
            return LoadReceipt(
                engine=self._options.engine_id,
                epoch=self._options.epoch,
                version=manifest.version,
                digest=str(staged["digest"]),
                t_start=t_start,
                t_staged=t_staged,
                t_end=t_end,
                tokens_recomputed=recomputed,
                prepare_s=float(staged["prepare_s"]),
                pause_s=t_end - t_staged,
            )

    async def activity(self) -> list[Activity]:
        """See `Engine.activity`; one stretch per turn, since vLLM answers at its end."""
        found, self._activity = self._activity, []
        return found

    async def close(self) -> None:
        """See `Engine.close`; may be called twice. A server started elsewhere goes on."""
        if self._fault is None:
            self._fault = EngineFault(field="engine", rule="open", value="closed")
            for turn in list(self._turns.values()):
                await self._abort(turn)
            pending = [turn.task for turn in self._turns.values()]
            if pending:
                await asyncio.wait(pending, timeout=_CLOSE_S)
        if self._watch is not None:
            self._watch.cancel()
        await self._client.close()
        self._kill()

    async def _connect(self) -> ServerFacts:
        """Ask the server what it is, once, and refuse one that cannot be trained from."""
        async with self._connecting:
            if self._facts is None:
                self._demand_open()
                facts = await self._client.facts()
                check_server(facts, self._options.precision)
                self._vocab_size = (await self._client.call("trueup_connect"))["vocab_size"]
                self._facts = facts
            return self._facts

    async def _ask(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return await self._client.generate(body)
        except EngineFault:
            if self._fault is not None and self._fault.value != "closed":
                raise self._fault from None
            raise

    async def _abort(self, turn: _Turn) -> None:
        with contextlib.suppress(EngineFault):  # a server that is gone has no turn to end
            await self._client.abort(turn.id)

    @contextlib.asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Pause, and resume only if all went well; otherwise fence the engine."""
        self._resumed.clear()
        try:
            await self._client.pause(self._options.pause)
            yield
            await self._client.resume()
        except BaseException as error:
            self._fail(EngineFault(field="engine", rule="whole after an update", value=str(error)))
            raise
        finally:
            self._resumed.set()

    def _keep_watch(self) -> None:
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._watching())

    async def _watching(self) -> None:
        """While turns run, ask the engine's loop for a sign of life; none is a fault of the engine.

        An update asks it often enough by itself.
        """
        while self._turns and self._fault is None:
            await asyncio.sleep(self._watch_s)
            if self._turns and self._resumed.is_set():
                try:
                    await self._client.weight_version()
                except EngineFault as fault:
                    self._fail(fault)

    def _fail(self, fault: EngineFault) -> None:
        """Refuse everything from now on, and end the server: what it would say is not known."""
        self._fault = self._fault or fault
        self._kill()
        for turn in self._turns.values():
            turn.task.cancel()

    def _completion(
        self,
        request: GenerateRequest,
        reply: Reply,
        session: Session,
        sent_at: int,
        t_submit: float,
    ) -> Completion:
        now = time.monotonic()
        sampling = request.sampling
        facts = self._facts
        assert facts is not None, "no reply without a connection"
        known = provenance(
            session,
            request.prompt_ids,
            reply,
            sent_at=sent_at,
            keep=self._options.kv_mode == "keep",
            block=facts.cache_block if facts.prefix_cache else 0,
            template=Span(
                start=0,
                stop=0,
                version=0,
                engine=self._options.engine_id,
                epoch=self._options.epoch,
                precision=self._options.precision,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
            ),
        )
        self._activity.append(
            Activity(
                t0=t_submit,
                t1=now,
                tokens_decoded=len(reply.token_ids),
                tokens_prefilled=known.prefilled,
                steps=len(reply.token_ids),
            )
        )
        return Completion(
            session=request.session,
            token_ids=reply.token_ids,
            logps=reply.logps,
            spans=known.spans,
            finish=reply.finish,
            tokens_prefilled=known.prefilled,
            tokens_cached=reply.cached,
            tokens_recomputed=known.recomputed,
            t_submit=t_submit,
            t_start=t_submit,
            t_end=now,
            replay=reply.replay,
        )

    def _check_tensors(self, manifest: WeightManifest) -> None:
        """Names and shapes, before vLLM could find out half-way through a load."""
        expected = self._options.expected
        if expected is None:
            return
        given = {entry.name: entry.shape for entry in manifest.tensors}
        for name in sorted(expected.keys() | given.keys()):
            if given.get(name) != expected.get(name):
                raise TransportFault(
                    field=f"version {manifest.version}: {name}",
                    rule=f"of shape {expected.get(name, 'none: the model lacks it')}",
                    value=given.get(name, "nothing"),
                )

    def _demand_possible(self, request: GenerateRequest, facts: ServerFacts) -> None:
        demand_sound(
            request,
            vocab_size=self._vocab_size,
            positions=facts.context,
            forces=wire.PROCESSOR in facts.processors,
        )
        if request.sampling.temperature < _LEAST_TEMPERATURE:
            raise EngineFault(
                field="sampling.temperature",
                rule=f"at least {_LEAST_TEMPERATURE} on vLLM",
                value=request.sampling.temperature,
            )

    def _demand_open(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _demand_serving(self) -> None:
        self._demand_open()
        if self._version < 0:
            raise EngineFault(
                field=f"engine {self._options.engine_id}", rule="serving a version", value="empty"
            )


def _retrieved(task: asyncio.Task[Any]) -> None:
    """Nobody waits for an aborted turn: look at its end, so that asyncio does not report it."""
    if not task.cancelled():
        task.exception()
