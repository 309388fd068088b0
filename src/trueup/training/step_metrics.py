"""What the learner records of a step beside its correction's and update's metrics."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trueup.config import Config
from trueup.corrections.table import find
from trueup.diagnostics.attribution import attribution, repeat_variance
from trueup.diagnostics.health import health, stationary
from trueup.diagnostics.labels import label_test
from trueup.diagnostics.metrics import METRICS, Metric, Values, metric_of, metrics_of
from trueup.diagnostics.sketch import QuantileSketch
from trueup.gap import PolicyGap
from trueup.training.step_batch import StepBatch
from trueup.training.version_scores import VersionScores


def batch_metrics(batch: StepBatch, gap: PolicyGap) -> dict[str, Metric]:
    """Of the episodes themselves."""
    moved = _moved_by_updates(batch)
    reads = [episode.counters.get("reads", 0) for episode in batch.episodes]
    return {
        "episode/reward": metric_of(gap.reward),
        "episode/tokens": metric_of(batch.packed.action_offsets.diff().float()),
        "episode/reads": metric_of(torch.tensor(reads, dtype=torch.float32)),
        **metrics_of({"gap/abs_rescored": moved.abs()}),
    }


def _moved_by_updates(batch: StepBatch) -> Tensor:
    """[n] log-prob under a later version minus that when sampled, both by the engine.

    Where a cache was computed again, the forward scored the tokens before it by the way: staleness
    in the engine's own arithmetic, without a second scorer's noise.
    """
    differences = [torch.zeros(0)]
    for segment in (segment for episode in batch.episodes for segment in episode.segments):
        for again in segment.rescored:
            then = segment.logp_behaviour[again.start : again.start + len(again.logps)]
            differences.append(torch.tensor(again.logps) - torch.tensor(then))
    return torch.cat(differences)


def attribution_metrics(gap: PolicyGap, scores: VersionScores) -> dict[str, Metric]:
    """Of the gap by cause; nothing if nothing was scored for it."""
    if gap.logp_version is None:
        return {}
    scored = torch.isfinite(gap.logp_version) & gap.valid
    staleness = gap.logp_target - gap.logp_version
    behind = gap.logp_version if gap.logp_cache is None else gap.logp_cache
    cache, engine = gap.logp_version - behind, behind - gap.logp_behaviour
    values: dict[str, Values] = {
        "gap/staleness": (staleness, scored),
        "gap/abs_staleness": (staleness.abs(), scored),
        "gap/cache": (cache, scored),
        "gap/abs_cache": (cache.abs(), scored),
        "gap/engine": (engine, scored),
        "gap/abs_engine": (engine.abs(), scored),
        "gap/scored": scored.float(),
    }
    noise = 0.0
    if scores.again is not None:
        again = torch.isfinite(scores.again)
        half = (gap.logp_target.double() - scores.again.double()).square() / 2
        values["attribution/scorer_variance"] = (half, again)
        noise = float(repeat_variance(gap.logp_target, scores.again))
    metrics = metrics_of(values)
    parts = attribution(gap, scorer_variance=noise, resamples=1)
    if parts.scored:
        metrics["attribution/share_staleness"] = Metric.of(parts.staleness.share_above_noise)
        metrics["attribution/share_cache"] = Metric.of(parts.cache.share_above_noise)
        metrics["attribution/share_engine"] = Metric.of(parts.engine.share_above_noise)
    if scores.before is not None:
        found = label_test(gap, logp_before=scores.before)
        if found.standard_error:
            metrics["label/slope"] = Metric.of(found.slope)
            metrics["label/se"] = Metric.of(found.standard_error)
    return metrics


def sketches(gap: PolicyGap) -> dict[str, bytes]:
    """Distributions of the metrics that the table calls sketched."""
    size = gap.log_ratio[gap.valid].abs()
    found = {"gap/abs_log_ratio": QuantileSketch.of(size).to_bytes()} if len(size) else {}
    assert all(METRICS[name].sketched for name in found)
    return found


class Judge:
    """Judges every step, and over steps what must not move."""

    def __init__(self, config: Config, *, precision: str) -> None:
        """Nothing has been seen yet.

        Args:
            config: The run.
            precision: Of trainer and engine (`health.ceiling`).
        """
        preset = find(config.correction.preset)
        bounds = preset.bounds(preset.resolve(config.correction.params))
        self._corrects = bounds != (1.0, 1.0)
        self._learns = config.train.lr > 0
        self._precision = precision
        self._mismatch: list[Metric] = []

    def __call__(
        self, metrics: Mapping[str, Metric], *, n_changed: int | None
    ) -> dict[str, Metric]:
        """`health/…` of a step: 1 where the verdict failed, 0 where it passed.

        Args:
            metrics: All others of the step.
            n_changed: Elements that the published version changed; None without one.
        """
        verdicts = health(
            metrics,
            corrects=self._corrects,
            n_changed=n_changed if self._learns else None,
            precision=self._precision,
        )
        if not self._learns and "gap/abs_log_ratio" in metrics:
            self._mismatch.append(metrics["gap/abs_log_ratio"])
            verdicts += (stationary(self._mismatch),)
        return {f"health/{v.name}": Metric.of(0.0 if v.ok else 1.0) for v in verdicts}
