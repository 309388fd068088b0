"""What the controller needs of the other parts, wherever they live, and where it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trueup.training.messages import Consumed, Discarded, EpisodeSpec, ProbeReport, StepReport
from trueup.types import EpisodeRef, LoadReceipt, WeightManifest


class RolloutPort(Protocol):
    """Runs episodes, wherever it lives."""

    async def run(self, spec: EpisodeSpec) -> EpisodeRef:
        """Run an attempt to its end."""
        ...

    async def abort(self, episode: str) -> None:
        """Withdraw an attempt: its `run` returns soon."""
        ...

    async def probe(self, engine: int, name: str) -> tuple[str, ...]:
        """Have an engine decode the probe set: ids of what is stored, none if there is no set.

        Raises:
            EngineFault: It could not.
        """
        ...


class LearnerPort(Protocol):
    """Trains and publishes, wherever it lives."""

    async def publish(self) -> WeightManifest:
        """Publish the version it starts with."""
        ...

    async def update(
        self, step: int, consumed: Sequence[Consumed], discarded: Sequence[Discarded]
    ) -> StepReport:
        """Train a step batch and publish the result."""
        ...

    async def probed(self, receipt: LoadReceipt, episodes: Sequence[str]) -> ProbeReport:
        """Judge a load and, if it was probed, what the engine decoded."""
        ...

    async def record(self, step: int, discarded: Sequence[Discarded]) -> None:
        """Record episodes that will never be trained."""
        ...

    async def checkpoint(self, step: int, state: dict[str, Any]) -> tuple[str, str]:
        """Write a checkpoint: its path in the run directory, and its digest."""
        ...

    async def retire(self, version: int) -> None:
        """Free the versions below one."""
        ...


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins: at zero, or at a checkpoint."""

    step: int = 0
    version: int = 0
    group: int = 0
    """First group id that is free."""
    stream: dict[str, Any] = field(default_factory=dict)
    """State of the task stream."""
    resumed_from: str = ""
    """Path of the checkpoint in the run directory; empty for a new run."""
    skipped: tuple[tuple[str, str], ...] = ()
    """Newer checkpoints that did not verify, with the reason."""
    abandoned: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """Groups of the earlier life that were not trained, with their episodes."""
