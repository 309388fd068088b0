"""Weights that are not those of the version: the engine says v, and part of it is something else.

The receipt carries the digest that the trainer expects, as that of an engine does which digests
what it was sent, and not what its kernels read. Nothing but log-probs can tell.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from trueup.engines.base import Engine
from trueup.engines.lying.engine import LyingEngine, retold
from trueup.engines.lying.forge import Forge
from trueup.errors import EngineFault
from trueup.types import (
    Completion,
    EngineInfo,
    GenerateRequest,
    LoadReceipt,
    WeightManifest,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_HEADS = ("lm_head.", "embed_out.")
"""Prefixes of the output head, where it has tensors of its own."""
_EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens|embed_in|wte)\.weight$")
_BLOCK = re.compile(r"\.(?:layers|h)\.(\d+)\.")
_INTO_RESIDUAL = re.compile(
    r"\.(o_proj|out_proj|attention\.dense|attn\.c_proj"
    r"|down_proj|fc2|dense_4h_to_h|mlp\.c_proj)\.(weight|bias)$"
)
"""What a block adds to the residual stream is linear in these: zeroed, the block does nothing."""


class AlteredWeights(LyingEngine, ABC):
    """Loads a version with some tensors replaced, and attests the whole one."""

    def __init__(self, inner: Engine, *, seed: int, forge: Forge) -> None:
        """Wrap an engine that reads by `forge`."""
        super().__init__(inner, seed=seed, forge=forge)
        self._before: dict[str, Tensor] = {}
        self._loading = asyncio.Lock()

    async def load(self, manifest: WeightManifest) -> LoadReceipt:
        """See `Engine.load`."""
        async with self._loading:
            tensors = await asyncio.to_thread(self._forge, manifest)
            altered = self._altered(tensors, self._before)
            with self._forge.offer(manifest, tensors, altered) as forged:
                receipt = await self._inner.load(forged)
            self._before = tensors
            return replace(receipt, digest=manifest.digest)

    @abstractmethod
    def _altered(
        self, tensors: Mapping[str, Tensor], before: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """The tensors that differ from the version's; `before` is empty at the first load."""


class StaleHead(AlteredWeights):
    """The output head is that of the version before.

    A tied head has no tensor of its own. It gets one, under the name that transformers gives it, so
    the inner engine must have been built for an untied model (`lying.untied`).
    """

    def _altered(
        self, tensors: Mapping[str, Tensor], before: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        source = before or tensors
        own = {name: source[name] for name in tensors if name.startswith(_HEADS)}
        if own:
            return own
        (embedding,) = (name for name in tensors if _EMBEDDINGS.search(name))
        return {"lm_head.weight": source[embedding]}


class OldTensor(AlteredWeights):
    """One matrix of a block, the same at every load, is that of the version before."""

    def _altered(
        self, tensors: Mapping[str, Tensor], before: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        matrices = sorted(n for n, x in tensors.items() if x.dim() == 2 and _BLOCK.search(n))
        name = Random(self._seed).choice(matrices)
        return {name: before[name]} if before else {}


class SkippedLayer(AlteredWeights):
    """One block adds nothing to the residual stream."""

    def _altered(
        self, tensors: Mapping[str, Tensor], before: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        blocks = sorted({int(m[1]) for name in tensors if (m := _BLOCK.search(name))})
        if not blocks:
            raise EngineFault(field="tensors", rule="in numbered blocks", value=sorted(tensors)[:3])
        skipped = Random(self._seed).choice(blocks)
        return {
            name: x.new_zeros(x.shape)
            for name, x in tensors.items()
            if (m := _BLOCK.search(name)) and int(m[1]) == skipped and _INTO_RESIDUAL.search(name)
        }


class MissedUpdate(AlteredWeights):
    """Every update is acknowledged and is served one load later."""

    def _altered(
        self, tensors: Mapping[str, Tensor], before: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        return before


class NoopQuantisation(AlteredWeights):
    """Claims INT8 and computes as an engine that is not quantised does.

    What is published to an engine that quantises is float32; the one behind this gets it rounded to
    the precision that it computes in.
    """

    _dtype: torch.dtype | None = None

    async def info(self) -> EngineInfo:
        """See `Engine.info`."""
        told = await self._inner.info()
        return replace(told, precision=_claimed(told.precision))

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`."""
        said = await self._inner.generate(request)
        return retold(said, lambda s: replace(s, precision=_claimed(s.precision)))

    async def load(self, manifest: WeightManifest) -> LoadReceipt:
        """See `Engine.load`."""
        import torch

        self._dtype = getattr(torch, (await self._inner.info()).precision)
        return await super().load(manifest)

    def _altered(
        self, tensors: Mapping[str, Tensor], before: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        return {n: x.to(self._dtype) for n, x in tensors.items() if x.dtype != self._dtype}


def _claimed(precision: str) -> str:
    return f"{precision}+int8"
