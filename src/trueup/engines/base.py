"""What generates tokens: the port every inference engine stands behind.

An engine owns a cache of keys and values per *session* (an episode). It is told weights by manifest
and attests what it serves. It sets the provenance of every token itself, at the point where it is
true. It never mixes versions within one token: a load stages and verifies the new tensors beside
the old ones and swaps them between two decode steps.
"""

from __future__ import annotations

from typing import Protocol

from trueup.types import (
    Activity,
    Completion,
    EngineInfo,
    GenerateRequest,
    LoadReceipt,
    WeightManifest,
)


class Engine(Protocol):
    """An asynchronous, process-capable inference engine.

    States: *empty* (no completed load yet: refuses to generate) -> *serving* -> *closed*.
    """

    async def info(self) -> EngineInfo:
        """Identity, epoch, precision and the version now served."""
        ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one turn.

        The prompt holds all ids before the first sampled one. What the session has cached of it is
        reused; only new tokens are computed.

        Raises:
            EngineFault: No completed load, the prompt does not fit, non-finite logits, closed.
        """
        ...

    async def release(self, session: str) -> None:
        """Forget a session's cache; a generation still running for it ends with ABORT."""
        ...

    async def load(self, manifest: WeightManifest) -> LoadReceipt:
        """Stage, verify, swap at a token boundary, attest by the digest of the engine's own memory.

        Running generations continue: their spans split at the swap and their caches are recomputed.

        Raises:
            TransportFault: A tensor is missing, foreign, of another shape or dtype, or its digest
                differs. The old version keeps being served, as the old version.
        """
        ...

    async def activity(self) -> list[Activity]:
        """What was decoded since the last call, in stretches of about 50 ms."""
        ...

    async def close(self) -> None:
        """End every generation with ABORT and free the memory."""
        ...
