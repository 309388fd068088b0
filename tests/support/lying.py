"""Lying engines over a tiny embedded one, and the weights they are given."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from support.embedded import Publisher, copied, tiny
from trueup.engines.base import Engine
from trueup.engines.embedded.core import EmbeddedCore
from trueup.engines.embedded.engine import EmbeddedEngine
from trueup.engines.lying import FAULTS, Forge, plant
from trueup.models.load import load_state
from trueup.sync.digest import digest
from trueup.types import WeightManifest


@lru_cache
def weights(seed: int) -> Any:
    """A tiny model, made once; nobody may change it."""
    return tiny(seed=seed)


@lru_cache
def peaked() -> Any:
    """A tiny model whose distributions are not flat."""
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    return model


@dataclass
class Rig:
    """An engine with one fault, or with none, and who publishes to it."""

    fault: str = ""
    seed: int = 0
    model: Any = field(default_factory=lambda: weights(0))
    slots: int = 8
    publisher: Publisher = field(default_factory=Publisher)

    def __post_init__(self) -> None:
        forge = Forge(self.publisher.transport.fetch, digest)
        demands = FAULTS[self.fault].demands if self.fault else {}
        keeps = {"kv_mode": "keep"} if demands.get("kv_mode") == "keep" else {}
        core = EmbeddedCore(
            self.model,
            engine_id="e",
            slots=self.slots,
            dtype=str(self.model.dtype).removeprefix("torch."),
            fetch=forge,
            digest=digest,
            **keeps,
        )
        honest = EmbeddedEngine(core)
        self.engine: Engine = (
            plant(honest, self.fault, seed=self.seed, forge=forge) if self.fault else honest
        )

    def publish(self, seed: int) -> WeightManifest:
        """The next version: a model of the same shape with other weights."""
        return self.publisher.publish(weights(seed))

    def play(self, script: Callable[[Engine], Awaitable[None]]) -> None:
        """Run a script against the engine and close it."""

        async def main() -> None:
            try:
                await script(self.engine)
            finally:
                await self.engine.close()

        asyncio.run(main())


def with_tensors(model: Any, tensors: dict[str, Tensor]) -> Any:
    """A copy of the model in which these tensors are others."""
    other = tiny(seed=99)
    load_state(other, {**copied(model), **tensors})
    return other
