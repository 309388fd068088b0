"""What is said of single tokens: whose log-prob it is, whether there is one, who sampled it."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from random import Random

from trueup.engines.lying.engine import LyingEngine
from trueup.types import Completion, FinishReason, GenerateRequest

_SHARES = (0.05, 0.1, 0.2)
"""Of the tokens whose log-prob is lost."""
_LOST = (math.nan, 0.0)
"""What stands in its place."""


class AppendedEos(LyingEngine):
    """A reply that is cut off gets a stop token that nobody sampled, in place of its last one.

    Its log-prob is 0.0: nothing was drawn. Where no stop token is asked for, none is known.
    """

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`."""
        asked = request.sampling
        if request.forced_ids is not None or not asked.stop_ids or asked.max_tokens < 2:
            return await self._inner.generate(request)
        shorter = replace(asked, max_tokens=asked.max_tokens - 1)
        said = await self._inner.generate(replace(request, sampling=shorter))
        if said.finish is not FinishReason.LENGTH:
            return said
        *before, last = said.spans
        return replace(
            said,
            token_ids=said.token_ids + array("i", asked.stop_ids[:1]),
            logps=said.logps + array("f", [0.0]),
            spans=(*before, replace(last, stop=last.stop + 1)),
            finish=FinishReason.STOP,
        )


class ShiftedLogprobs(LyingEngine):
    """Every token has the log-prob of the one before it; the first has that of the last."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`."""
        said = await self._inner.generate(request)
        return replace(said, logps=said.logps[-1:] + said.logps[:-1])


class DroppedLogprobs(LyingEngine):
    """A share of the tokens has no log-prob: NaN, or the 0.0 of a certain event."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`."""
        said = await self._inner.generate(request)
        choice = Random(self._seed)
        share, lost = choice.choice(_SHARES), choice.choice(_LOST)
        drops = Random(f"{self._seed} {request.prompt_ids} {request.sampling.key}")
        kept = array("f", (lost if drops.random() < share else x for x in said.logps))
        return replace(said, logps=kept)
