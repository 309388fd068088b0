"""Keys and values of older versions that are used and not spoken of.

Both need an inner engine that keeps what it has cached when weights change (`kv_mode = "keep"`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trueup.engines.base import Engine
from trueup.engines.lying.engine import LyingEngine, retold
from trueup.engines.lying.forge import Forge
from trueup.errors import EngineFault
from trueup.types import Completion, FinishReason, GenerateRequest, KVState, Span


class UnreportedKeptKV(LyingEngine):
    """Caches survive a swap, and spans say that they were computed again."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`."""
        said = await self._inner.generate(request)
        kept = [span for span in said.spans if span.kv is KVState.KEPT]
        # What an engine would have computed again at each swap: all but the last sample.
        swaps = sum(len(request.prompt_ids) + span.start - 1 for span in kept if span.start)
        idle = said.tokens_cached if kept and not kept[0].start else 0
        told = replace(
            said,
            tokens_recomputed=said.tokens_recomputed + swaps + idle,
            tokens_cached=said.tokens_cached - idle,
        )
        return retold(told, _as_recomputed)


def _as_recomputed(span: Span) -> Span:
    if span.kv is not KVState.KEPT:
        return span
    return replace(span, kv=KVState.RECOMPUTED, context_versions=())


class SurvivingPrefixCache(LyingEngine):
    """A prefix cache that is not emptied by a load: prompts seen before it keep their old prefix.

    A session that is released stays in the inner engine, and a new one whose prompt begins alike
    takes it over. What a session keeps across a load of its own is told as it is.
    """

    def __init__(self, inner: Engine, *, seed: int, forge: Forge) -> None:
        """Wrap an engine that keeps caches."""
        super().__init__(inner, seed=seed, forge=forge)
        self._held: dict[str, _Held] = {}
        """By the session that has it."""
        self._shelf: list[_Held] = []
        """Of released sessions, in order of release."""
        self._made = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`."""
        name = request.session
        if name not in self._held:
            self._held[name] = await self._place(request)
        held = self._held[name]
        if held.running:
            raise EngineFault(
                field=f"session {name}", rule="without a turn in progress", value=name
            )
        held.running, held.ids = True, array("i")
        try:
            said = await self._inner.generate(replace(request, session=held.inner))
        finally:
            held.running = False
        if said.finish is not FinishReason.ABORT:
            held.ids = request.prompt_ids + said.token_ids[:-1]
        return retold(replace(said, session=name), held.without_older)

    async def release(self, session: str) -> None:
        """See `Engine.release`; but what the session has cached stays where it is."""
        held = self._held.pop(session, None)
        if held is None:
            return
        if not held.ids:
            await self._inner.release(held.inner)
            return
        self._shelf.append(held)
        await self._make_room(0)

    async def _place(self, request: GenerateRequest) -> _Held:
        """Where a new session goes: to the cache that has most of its prompt, or to a fresh one."""
        info = await self._inner.info()
        best = max(
            self._shelf, key=lambda held: _common(held.ids, request.prompt_ids), default=None
        )
        if best is not None and _common(best.ids, request.prompt_ids):
            self._shelf.remove(best)
            return replace(best, born=info.version)
        await self._make_room(1)
        self._made += 1
        return _Held(inner=f"{request.session}.{self._made}", born=info.version)

    async def _make_room(self, more: int) -> None:
        """Let go of shelved caches, oldest first, until so many more sessions have a slot."""
        slots = (await self._inner.info()).slots
        while self._shelf and len(self._held) + len(self._shelf) + more > slots:
            await self._inner.release(self._shelf.pop(0).inner)


@dataclass(slots=True, kw_only=True)
class _Held:
    """What a session has in the inner engine."""

    inner: str
    """Its name there."""
    born: int
    """Version that was served when it began."""
    ids: array[int] = field(default_factory=lambda: array("i"))
    """What is cached there; empty while a turn is in progress."""
    running: bool = False

    def without_older(self, span: Span) -> Span:
        """The span, silent about versions from before the session began."""
        if span.kv is not KVState.KEPT:
            return span
        told = tuple(v for v in span.context_versions if v >= self.born)
        if set(told) <= {span.version}:
            return replace(span, kv=KVState.FRESH, context_versions=())
        return replace(span, context_versions=told)


def _common(cached: Sequence[int], prompt: Sequence[int]) -> int:
    """How many leading ids are the same."""
    pairs = enumerate(zip(cached, prompt, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(cached), len(prompt)))
