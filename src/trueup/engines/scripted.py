"""An engine that says what it is told to: for testing rollouts and controllers without torch.

It keeps the contract of `engines.base.Engine` (spans, versions, cache counts, aborts, refused
loads) and lets a test decide the rest: every reply, when a version arrives, how long things take,
what fails. It has no limit on slots.

Example:
    `ScriptedEngine({(1, 2): Reply(token_ids=(7, 3), logps=(-0.5, -0.1))})` answers the prompt
    `[1, 2]` with the tokens 7 and 3.
"""

from __future__ import annotations

import asyncio
import os
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trueup.errors import DataError, EngineFault, TransportFault
from trueup.types import (
    Activity,
    Completion,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    KVState,
    LoadReceipt,
    Span,
    WeightManifest,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What one request gets."""

    token_ids: Sequence[int]
    """At least up to the first stop id or max_tokens; what is behind that is not said."""
    logps: Sequence[float]
    versions: Mapping[int, int] = field(default_factory=dict)
    """Token index -> version that the engine serves from that token on."""
    delay_s: float = 0.0
    """Before the first token."""
    token_s: float = 0.0
    """Per token."""
    fault: EngineFault | None = None
    """Raised instead of an answer, after the delay."""


Script = Callable[[GenerateRequest], Reply] | Mapping[tuple[int, ...], Reply]


@dataclass(slots=True)
class _Session:
    """What a real engine would have cached."""

    ids: array[int]
    version: int
    kv: KVState = KVState.FRESH


@dataclass(slots=True)
class _Running:
    """A turn that is being said."""

    ids: array[int]
    logps: array[float]
    marks: list[tuple[int, int, KVState]]
    recomputed: int
    withdrawn: bool = False


class ScriptedEngine:
    """Implements `engines.base.Engine` from a script.

    Args:
        script: A function of the request, or a table from prompt ids to replies.
        engine_id: Goes into every span.
        epoch: How often it had been started.
        verify: Called with each manifest; raises TransportFault to refuse it.
        load_s: How long staging takes.
    """

    def __init__(
        self,
        script: Script,
        *,
        engine_id: str = "scripted",
        epoch: int = 0,
        verify: Callable[[WeightManifest], None] | None = None,
        load_s: float = 0.0,
    ) -> None:
        """Start empty."""
        self.calls: list[tuple[str, object]] = []
        """(method, argument) of every call, in order."""
        self._script = script
        self._engine_id = engine_id
        self._epoch = epoch
        self._verify = verify
        self._load_s = load_s
        self._version = -1
        self._digest = ""
        self._closed = False
        self._sessions: dict[str, _Session] = {}
        self._running: dict[str, _Running] = {}
        self._activity: list[Activity] = []

    async def info(self) -> EngineInfo:
        """See `Engine.info`."""
        self.calls.append(("info", None))
        return EngineInfo(
            engine=self._engine_id,
            epoch=self._epoch,
            kind="scripted",
            precision="float32",
            slots=1,
            version=self._version,
            pid=os.getpid(),
        )

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`.

        Raises:
            EngineFault: Empty, closed, a turn of the session is in progress, the script has no
                answer, or the reply says so.
            DataError: The reply ends before a stop id and before max_tokens.
        """
        self.calls.append(("generate", request))
        t_submit = time.monotonic()
        self._demand_serving()
        name, sampling = request.session, request.sampling
        if name in self._running:
            raise EngineFault(
                field=f"session {name}", rule="without a turn in progress", value=name
            )
        reply = self._reply(request)
        session = self._sessions.setdefault(name, _Session(array("i"), self._version))
        known = _common_prefix(session.ids, request.prompt_ids)
        stale = known > 0 and session.version != self._version
        if stale:
            session.kv = KVState.RECOMPUTED
        elif not known:
            session.kv = KVState.FRESH
        session.version = self._version
        turn = _Running(
            ids=array("i"),
            logps=array("f"),
            marks=[(0, self._version, session.kv)],
            recomputed=known if stale else 0,
        )
        session.ids = array("i", request.prompt_ids)
        self._running[name] = turn
        try:
            await asyncio.sleep(reply.delay_s)
            if reply.fault is not None:
                raise reply.fault
            finish = await self._say(turn, session, reply, request)
        finally:
            del self._running[name]
        now = time.monotonic()
        self._activity.append(
            Activity(
                t0=t_submit,
                t1=now,
                tokens_decoded=len(turn.ids),
                tokens_prefilled=len(request.prompt_ids) - known,
                steps=len(turn.ids),
            )
        )
        return Completion(
            session=name,
            token_ids=turn.ids,
            logps=turn.logps,
            spans=_spans(turn, self._span(sampling.temperature, sampling.top_p, sampling.top_k)),
            finish=finish,
            tokens_prefilled=len(request.prompt_ids) - known,
            tokens_cached=0 if stale else known,
            tokens_recomputed=turn.recomputed,
            t_submit=t_submit,
            t_start=t_submit,
            t_end=now,
        )

    async def release(self, session: str) -> None:
        """See `Engine.release`."""
        self.calls.append(("release", session))
        self._sessions.pop(session, None)
        if session in self._running:
            self._running[session].withdrawn = True

    async def load(self, manifest: WeightManifest) -> LoadReceipt:
        """See `Engine.load`."""
        self.calls.append(("load", manifest))
        if self._closed:
            raise EngineFault(field="engine", rule="open", value="closed")
        t_start = time.monotonic()
        await asyncio.sleep(self._load_s)
        if self._verify is not None:
            self._verify(manifest)
        t_staged = time.monotonic()
        self._digest = manifest.digest
        recomputed = self._swap(manifest.version)
        return LoadReceipt(
            engine=self._engine_id,
            epoch=self._epoch,
            version=manifest.version,
            digest=self._digest,
            t_start=t_start,
            t_staged=t_staged,
            t_end=time.monotonic(),
            tokens_recomputed=recomputed,
        )

    async def activity(self) -> list[Activity]:
        """See `Engine.activity`; one stretch per turn."""
        self.calls.append(("activity", None))
        found, self._activity = self._activity, []
        return found

    async def close(self) -> None:
        """See `Engine.close`."""
        self.calls.append(("close", None))
        self._closed = True
        for turn in self._running.values():
            turn.withdrawn = True
        self._sessions.clear()

    async def _say(
        self, turn: _Running, session: _Session, reply: Reply, request: GenerateRequest
    ) -> FinishReason:
        sampling = request.sampling
        for token, logp in zip(reply.token_ids, reply.logps, strict=True):
            await asyncio.sleep(reply.token_s)
            if turn.withdrawn:
                return FinishReason.ABORT
            if len(turn.ids) in reply.versions:
                self._swap(reply.versions[len(turn.ids)])
            turn.ids.append(token)
            turn.logps.append(logp)
            if len(turn.ids) > 1:
                session.ids.append(turn.ids[-2])
            if token in sampling.stop_ids:
                return FinishReason.STOP
            if len(turn.ids) == sampling.max_tokens:
                return FinishReason.LENGTH
        raise DataError(
            field="reply.token_ids",
            rule=f"as long as max_tokens ({sampling.max_tokens}) or ended by a stop id",
            value=list(reply.token_ids),
        )

    def _swap(self, version: int) -> int:
        """Serve a version; returns the tokens of running turns that are recomputed."""
        self._version = version
        total = 0
        for name, turn in self._running.items():
            session = self._sessions.get(name)
            if session is None:
                continue
            at = len(turn.ids)
            if at:
                session.kv = KVState.RECOMPUTED
                turn.recomputed += len(session.ids)
                total += len(session.ids)
            if turn.marks[-1][0] == at:
                turn.marks.pop()
            turn.marks.append((at, version, session.kv))
            session.version = version
        return total

    def _reply(self, request: GenerateRequest) -> Reply:
        if callable(self._script):
            return self._script(request)
        prompt = tuple(request.prompt_ids)
        if prompt not in self._script:
            raise EngineFault(field="prompt_ids", rule="in the script", value=prompt)
        return self._script[prompt]

    def _span(self, temperature: float, top_p: float, top_k: int) -> Span:
        return Span(
            start=0,
            stop=0,
            version=0,
            engine=self._engine_id,
            epoch=self._epoch,
            precision="float32",
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
        )

    def _demand_serving(self) -> None:
        if self._closed or self._version < 0:
            state = "closed" if self._closed else "empty"
            raise EngineFault(
                field=f"engine {self._engine_id}", rule="serving a version", value=state
            )


def refuse(version: int) -> Callable[[WeightManifest], None]:
    """A `verify` that finds one version broken."""

    def verify(manifest: WeightManifest) -> None:
        if manifest.version == version:
            raise TransportFault(
                field=f"version {version}: digest", rule=manifest.digest, value="scripted to differ"
            )

    return verify


def _common_prefix(cached: array[int], prompt: array[int]) -> int:
    """Leading prompt ids that are cached; the last one never counts: its logits are needed."""
    most = min(len(cached), len(prompt) - 1)
    return next((i for i in range(most) if cached[i] != prompt[i]), most)


def _spans(turn: _Running, template: Span) -> tuple[Span, ...]:
    stops = [start for start, _, _ in turn.marks[1:]] + [len(turn.ids)]
    return tuple(
        replace(template, start=start, stop=stop, version=version, kv=kv)
        for (start, version, kv), stop in zip(turn.marks, stops, strict=True)
        if start < stop
    )
