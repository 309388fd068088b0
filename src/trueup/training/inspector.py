"""What the trainer makes of a load: the receipt against the manifest, the probe against the floor.

It lives beside the weights: the versions that engines claim are scored there, between two steps.
An engine that is started again starts with an empty history, as its caches are empty.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trueup.diagnostics.grid import grid_test
from trueup.diagnostics.health import ceiling, loads
from trueup.diagnostics.metrics import Metric
from trueup.diagnostics.probe import Reading, floor_of, growth, limit_of, reading
from trueup.models.packed import PackedBatch
from trueup.training.messages import ProbeReport
from trueup.types import Episode, LoadReceipt, WeightManifest

Score = Callable[[PackedBatch, int], "Tensor | None"]
"""[N] log-probs under a version, or None if it is not kept (`trainer.Trainer.score`)."""
OnGrid = Callable[[PackedBatch, str], Tensor]
"""[N] log-probs of the newest version on the grid of a quantisation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A probe as far as it could be scored."""

    reading: Reading | None
    """None if no token could be."""
    batch: PackedBatch | None
    own: Tensor
    """[N] the trainer's log-probs; NaN where there is none."""
    behaviour: Tensor
    """[N] the engine's."""
    version: Tensor
    """[N] int64, the version claimed."""
    sequence: Tensor
    """[N] int64."""
    tokens: int
    """All that the engine sampled."""
    unknown: int
    """Of a version that the trainer has not produced yet, or without a finite log-prob."""
    cached: float
    """Share of the second turns' context that the engine found in its cache."""
    precision: str
    """Of the engine, as its spans say."""


def measure(episodes: Sequence[Episode], score: Score, *, newest: int) -> Measured:
    """Score what an engine decoded (`probe.decode`) under the versions that it claims.

    Args:
        episodes: One per sequence.
        score: The trainer's.
        newest: The trainer's version; no token can be of a later one.
    """
    segments = [s for episode in episodes for s in episode.segments if len(s.logp_behaviour)]
    spans = [span for segment in segments for span in segment.spans]
    lengths = torch.tensor([span.stop - span.start for span in spans], dtype=torch.int64)
    versions = torch.tensor([s.version for s in spans], dtype=torch.int64)
    version = versions.repeat_interleave(lengths)
    counts = torch.tensor([len(s.logp_behaviour) for s in segments], dtype=torch.int64)
    sequence = torch.arange(len(segments)).repeat_interleave(counts)
    behaviour = torch.tensor([x for s in segments for x in s.logp_behaviour])
    own = torch.full_like(behaviour, torch.nan)
    batch = PackedBatch.from_segments(segments) if segments else None
    if batch is not None:
        for claimed in sorted(set(versions.tolist())):
            scores = score(batch, claimed) if claimed <= newest else None
            if scores is not None:
                own = torch.where(version == claimed, scores, own)
    known = torch.isfinite(own) & torch.isfinite(behaviour)
    whole = sum(episode.counters["prompt"] for episode in episodes)
    return Measured(
        reading=reading(own[known], behaviour[known], sequence[known]) if known.any() else None,
        batch=batch,
        own=own,
        behaviour=behaviour,
        version=version,
        sequence=sequence,
        tokens=len(behaviour),
        unknown=int(((version > newest) | ~torch.isfinite(behaviour)).sum()),
        cached=sum(episode.counters["cached"] for episode in episodes) / max(whole, 1),
        precision=spans[0].precision if spans else "",
    )


@dataclass(slots=True)
class _Engine:
    """What an engine has shown since it was started."""

    sound: list[Reading] = field(default_factory=list)
    """Readings that were no alarm."""
    all: list[Reading] = field(default_factory=list)
    grid_tested: bool = False


class Inspector:
    """Judges every load, and hands the next step what to record of it.

    Args:
        score: The trainer's.
        on_grid: The trainer's on a coarser grid.
        trained: Precision of the trainer.
        learns: Weights are meant to change; if not, a gap that grows is an alarm.
    """

    def __init__(self, score: Score, on_grid: OnGrid, *, trained: str, learns: bool) -> None:
        """Nothing was loaded yet."""
        self._score = score
        self._on_grid = on_grid
        self._trained = trained
        self._learns = learns
        self._digests: dict[int, str] = {}
        self._engines: defaultdict[tuple[str, int, str], _Engine] = defaultdict(_Engine)
        """By name, epoch and precision."""
        self._metrics: dict[str, Metric] = {}

    def published(self, manifest: WeightManifest) -> None:
        """A version that engines may load from now on."""
        self._digests[manifest.version] = manifest.digest

    def __call__(
        self, receipt: LoadReceipt, episodes: Sequence[Episode], *, newest: int
    ) -> ProbeReport:
        """Judge a load.

        Args:
            receipt: What the engine attests.
            episodes: The probe that it decoded afterwards; empty if this load is not probed.
            newest: The trainer's version now.
        """
        differs = receipt.digest != self._digests.get(receipt.version, receipt.digest)
        metrics = {"load/digest_differs": Metric.of(float(differs))}
        measured = measure(episodes, self._score, newest=newest)
        found, floor, limit = measured.reading, None, None
        if measured.tokens:
            metrics["probe/unknown"] = Metric.of(measured.unknown / measured.tokens)
            metrics["probe/cached"] = Metric.of(measured.cached)
        if found is not None:
            engine = self._engines[receipt.engine, receipt.epoch, measured.precision]
            floor = floor_of(engine.sound)
            limit = limit_of(found, floor, ceiling(f"{self._trained}+{measured.precision}"))
            metrics["probe/abs_gap"] = _spread(found)
            metrics["probe/excess"] = Metric.of(found.mean / limit)
            engine.all.append(found)
            if found.mean <= limit:
                engine.sound.append(found)
            if not self._learns:
                metrics["probe/growth"] = Metric.of(growth(engine.all))
            if not engine.grid_tested:
                metrics |= self._test_grid(measured, newest)
                engine.grid_tested = "grid/slope" in metrics
        for name, metric in metrics.items():
            before = self._metrics.get(name)
            self._metrics[name] = metric if before is None else before.merge(metric)
        return ProbeReport(
            engine=receipt.engine,
            epoch=receipt.epoch,
            version=receipt.version,
            tokens=measured.tokens,
            cached=measured.cached,
            mean=None if found is None else found.mean,
            p99=None if found is None else found.p99,
            max=None if found is None else found.max,
            floor=None if floor is None else floor.level,
            limit=limit if limit is not None and math.isfinite(limit) else None,
            alarms=tuple((v.name, v.message) for v in loads(metrics) if not v.ok),
        )

    def _test_grid(self, measured: Measured, newest: int) -> dict[str, Metric]:
        """Once per engine: an option that does nothing does so in every load."""
        grid = measured.precision.partition("+")[2]
        here = torch.isfinite(measured.own) & torch.isfinite(measured.behaviour)
        here &= measured.version == newest
        if not grid or measured.batch is None or not here.any():
            return {}
        found = grid_test(
            measured.own[here],
            self._on_grid(measured.batch, grid)[here],
            measured.behaviour[here],
            measured.sequence[here],
        )
        return {
            "grid/slope": Metric.of(found.slope),
            "grid/se": Metric.of(found.standard_error),
            "grid/size": Metric.of(found.size),
        }

    def take_metrics(self) -> dict[str, Metric]:
        """Of the loads since the last call."""
        found, self._metrics = self._metrics, {}
        return found


def _spread(found: Reading) -> Metric:
    total = found.mean * found.tokens
    return Metric(sum=total, count=found.tokens, min=found.min, max=found.max)
