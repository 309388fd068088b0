"""Engines with a hidden fault, and the two versions that a diagnosis examines them with."""

import asyncio
import copy
import random
from array import array
from typing import Any

import torch

from support.embedded import VOCABULARY, tiny
from trueup.diagnosis.case import Case
from trueup.diagnosis.diagnose import Diagnosis
from trueup.diagnosis.exam import Questions, Release
from trueup.diagnosis.examine import examine
from trueup.engines.base import Engine
from trueup.engines.embedded.core import EmbeddedCore
from trueup.engines.embedded.engine import EmbeddedEngine
from trueup.engines.lying import FAULTS, Forge, plant
from trueup.models.load import state_tensors
from trueup.sync.digest import digest
from trueup.sync.inprocess import InProcessTransport


def versions(seed: int, dtype: str = "float32") -> tuple[Any, Any]:
    """A tiny model and what two Adam steps make of it."""
    before = tiny(seed=seed, hidden_size=64)
    after = copy.deepcopy(before)
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(after.parameters(), lr=5e-4)
    for _ in range(2):
        ids = torch.randint(0, VOCABULARY, (8, 24), generator=generator)
        optimiser.zero_grad()
        after(input_ids=ids, labels=ids).loss.backward()
        optimiser.step()
    kind = getattr(torch, dtype)
    return before.to(kind), after.requires_grad_(False).to(kind)


def questions(seed: int = 0, **sizes: Any) -> Questions:
    """Some of random prompts."""
    rng = random.Random(seed)
    prompts = [
        array("i", [rng.randrange(VOCABULARY) for _ in range(rng.randint(8, 14))])
        for _ in range(80)
    ]
    return Questions(prompts=prompts, stop_ids=(3,), seed=seed, **sizes)


def examined(fault: str = "", *, seed: int = 0, dtype: str = "float32") -> tuple[Case, Diagnosis]:
    """What the diagnosis says of an engine with this fault, or of a sound one."""
    before, after = versions(seed, dtype)
    transport = InProcessTransport()
    manifests = [transport.publish(n, state_tensors(m)) for n, m in ((1, before), (2, after))]
    old, new = (Release.of(m, transport.fetch(m)) for m in manifests)
    forge = Forge(transport.fetch, digest)
    keeps = fault != "" and FAULTS[fault].demands.get("kv_mode") == "keep"
    core = EmbeddedCore(
        copy.deepcopy(before),
        engine_id="e",
        slots=48,
        dtype=dtype,
        kv_mode="keep" if keeps else "recompute",
        fetch=forge,
        digest=digest,
    )
    engine: Engine = EmbeddedEngine(core)
    if fault:
        engine = plant(engine, fault, seed=seed, forge=forge)

    async def main() -> tuple[Case, Diagnosis]:
        try:
            return await examine(engine, before, old=old, new=new, questions=questions(seed))
        finally:
            await engine.close()

    return asyncio.run(main())
