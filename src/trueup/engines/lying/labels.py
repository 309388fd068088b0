"""Provenance that is not true: what was sampled is right, what is said of it is not."""

from __future__ import annotations

from dataclasses import replace

from trueup.engines.base import Engine
from trueup.engines.lying.engine import LyingEngine, retold
from trueup.engines.lying.forge import Forge
from trueup.types import Completion, GenerateRequest, LoadReceipt, WeightManifest


class LabelOffByOne(LyingEngine):
    """Spans name the version that was loaded before the one that sampled them."""

    def __init__(self, inner: Engine, *, seed: int, forge: Forge) -> None:
        """Wrap an engine that has loaded nothing yet."""
        super().__init__(inner, seed=seed, forge=forge)
        self._before: dict[int, int] = {}

    async def load(self, manifest: WeightManifest) -> LoadReceipt:
        """See `Engine.load`."""
        served = (await self._inner.info()).version
        receipt = await self._inner.load(manifest)
        self._before.setdefault(manifest.version, served if served >= 0 else manifest.version)
        return receipt

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`."""
        said = await self._inner.generate(request)
        return retold(said, lambda s: replace(s, version=self._before.get(s.version, s.version)))


class LabelByClient(LyingEngine):
    """The whole reply gets the version that is served when it arrives."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`."""
        said = await self._inner.generate(request)
        if not said.spans:
            return said
        served = (await self._inner.info()).version
        whole = replace(said.spans[0], stop=len(said.token_ids), version=served)
        return replace(said, spans=(whole,))
