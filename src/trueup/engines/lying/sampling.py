"""Sampling that is not what was asked, or log-probs that are not those of what was sampled from.

What is asked is told in every span. Where tokens are sampled by one setting and log-probs are those
of another, the engine decodes the sampled tokens once more as they are given, behind the same
cache; a load then waits until no turn is in progress, because one version must do both.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import replace
from random import Random

from trueup.engines.base import Engine
from trueup.engines.lying.engine import LyingEngine, retold
from trueup.engines.lying.forge import Forge
from trueup.errors import EngineFault
from trueup.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    LoadReceipt,
    SamplingParams,
    Span,
    WeightManifest,
)

_TEMPERATURES = (0.7, 1.4)
"""Factors on the temperature that is asked for."""
_TOP_P = 0.9


class RescoredSampling(LyingEngine, ABC):
    """Samples by one setting, returns log-probs by another, and tells the one that was asked."""

    def __init__(self, inner: Engine, *, seed: int, forge: Forge) -> None:
        """Wrap an engine that decodes given tokens (`EngineInfo.forces`)."""
        super().__init__(inner, seed=seed, forge=forge)
        self._turns = 0
        self._beginning = asyncio.Lock()
        self._quiet = asyncio.Event()
        self._quiet.set()

    @abstractmethod
    def _sampled(self, asked: SamplingParams) -> SamplingParams:
        """What tokens are sampled by."""

    @abstractmethod
    def _scored(self, asked: SamplingParams) -> SamplingParams:
        """What log-probs are computed by."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`."""
        async with self._beginning:
            self._turns += 1
            self._quiet.clear()
        try:
            said = await self._said(request)
        finally:
            self._turns -= 1
            if not self._turns:
                self._quiet.set()
        return retold(said, lambda span: _as_asked(span, request.sampling))

    async def load(self, manifest: WeightManifest) -> LoadReceipt:
        """See `Engine.load`; begins when the turns in progress have ended."""
        async with self._beginning:
            await self._quiet.wait()
            return await self._inner.load(manifest)

    async def _said(self, request: GenerateRequest) -> Completion:
        asked = request.sampling
        scored = self._scored(asked)
        if request.forced_ids is not None:
            return await self._inner.generate(replace(request, sampling=scored))
        if not (info := await self._inner.info()).forces:
            raise EngineFault(
                field=f"engine {info.engine}", rule="one that decodes given tokens", value=info.kind
            )
        sampled = self._sampled(asked)
        said = await self._inner.generate(replace(request, sampling=sampled))
        if sampled == scored or said.finish is FinishReason.ABORT:
            return said
        again = replace(
            request,
            forced_ids=said.token_ids,
            sampling=replace(scored, max_tokens=len(said.token_ids), stop_ids=()),
        )
        rescored = await self._inner.generate(again)
        if rescored.finish is FinishReason.ABORT:  # of the tokens, those that have a log-prob
            return rescored
        return replace(said, logps=rescored.logps, t_end=rescored.t_end)


class WrongTemperature(RescoredSampling):
    """Tokens are sampled at another temperature; log-probs are those at the one that was asked."""

    def _sampled(self, asked: SamplingParams) -> SamplingParams:
        factor = Random(self._seed).choice(_TEMPERATURES)
        return replace(asked, temperature=asked.temperature * factor)

    def _scored(self, asked: SamplingParams) -> SamplingParams:
        return asked


class RawLogprobs(RescoredSampling):
    """Log-probs are those of the logits, before temperature and truncation."""

    def _sampled(self, asked: SamplingParams) -> SamplingParams:
        return asked

    def _scored(self, asked: SamplingParams) -> SamplingParams:
        return replace(asked, temperature=1.0, top_p=1.0, top_k=0)


class UnreportedTopP(LyingEngine):
    """A truncation that nobody asked for; log-probs are those of what was sampled from."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`."""
        asked = request.sampling
        cut = replace(asked, top_p=min(asked.top_p, _TOP_P))
        said = await self._inner.generate(replace(request, sampling=cut))
        return retold(
            replace(said, replay=None) if said.replay else said,
            lambda span: _as_asked(span, asked),
        )


def _as_asked(span: Span, asked: SamplingParams) -> Span:
    return replace(span, temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k)
