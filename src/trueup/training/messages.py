"""What the controller tells the rollout worker and the learner, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass

from trueup.training.codec import register
from trueup.types import Task, WeightManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSpec:
    """One attempt to run."""

    id: str
    task: Task
    group: int
    member: int
    attempt: int
    engine: int
    """Index of the engine that samples it."""
    key: tuple[int, ...]
    """Key of its sampling noise and its world: the same for the same draw of the task stream."""
    temperature: float
    store: bool
    """Keep its tokens for the trainer (evaluation does not)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    """An episode of a step batch."""

    episode: str
    finished_version: int
    """Trainer's version when it finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Discarded:
    """An episode that will never be trained."""

    episode: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricValue:
    """One metric of a step, mergeable."""

    name: str
    sum: float
    count: float
    min: float
    max: float
    sketch: bytes | None = None
    """Of its distribution (`diagnostics.sketch`), where the metric table says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a training step did."""

    step: int
    version: int
    """Version after the step; that before it if nothing was learned."""
    manifest: WeightManifest | None
    """Of the published version; None if nothing was learned."""
    episodes: tuple[str, ...]
    """Those it consumed."""
    tokens: int
    """Action tokens consumed."""
    metrics: tuple[MetricValue, ...]
    phases: dict[str, float]
    """Seconds of each phase."""
    t0: float
    t1: float
    t_publish: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """What the trainer makes of a load (`inspector.Inspector`)."""

    engine: str
    epoch: int
    version: int
    """The version loaded."""
    tokens: int = 0
    """Sampled by the probe; 0 where this load was not probed."""
    cached: float = 0.0
    """Share of the second turns' context that the engine found in its cache."""
    mean: float | None = None
    """Mean |log π_v − log μ| in nats; it and the two below are None where nothing was scored."""
    p99: float | None = None
    max: float | None = None
    floor: float | None = None
    """Level of the sound loads before, in nats; None before there is one."""
    limit: float | None = None
    """Largest mean that is no alarm."""
    alarms: tuple[tuple[str, str], ...] = ()
    """Name and meaning of each verdict that failed."""


register(EpisodeSpec, Consumed, Discarded, MetricValue, StepReport, ProbeReport)
