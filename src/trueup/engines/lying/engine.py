"""The engine that lies: it stands behind the port like any other and passes everything on.

As it is here it tells the truth. A fault is a subclass that overrides what it lies about and
nothing else, so that whatever a test finds can only come from that one thing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trueup.engines.base import Engine
from trueup.engines.lying.forge import Forge
from trueup.types import (
    Activity,
    Completion,
    EngineInfo,
    GenerateRequest,
    LoadReceipt,
    Span,
    WeightManifest,
)


class LyingEngine:
    """Implements `engines.base.Engine` by another engine.

    Args:
        inner: What computes; owned by this engine from now on.
        seed: Decides what a fault leaves open (which block, which temperature).
        forge: What `inner` reads versions by.
    """

    def __init__(self, inner: Engine, *, seed: int, forge: Forge) -> None:
        """Wrap an engine, loaded or not."""
        self._inner = inner
        self._seed = seed
        self._forge = forge

    async def info(self) -> EngineInfo:
        """See `Engine.info`."""
        return await self._inner.info()

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`."""
        return await self._inner.generate(request)

    async def release(self, session: str) -> None:
        """See `Engine.release`."""
        await self._inner.release(session)

    async def load(self, manifest: WeightManifest) -> LoadReceipt:
        """See `Engine.load`."""
        return await self._inner.load(manifest)

    async def activity(self) -> list[Activity]:
        """See `Engine.activity`."""
        return await self._inner.activity()

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._inner.close()


def retold(completion: Completion, tell: Callable[[Span], Span]) -> Completion:
    """The same tokens with another provenance."""
    return replace(completion, spans=tuple(map(tell, completion.spans)))
