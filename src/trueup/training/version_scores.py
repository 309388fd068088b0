"""Scores of a step batch under other weights than the current: what attribution is made of.

Each costs one forward of the tokens that it scores, so each has a share of the episodes, drawn
without regard to what they hold. Tokens that are not scored are NaN.

Legend: N action tokens, E episodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.config import Config
from trueup.gap import distinct
from trueup.models.hybrid import writers
from trueup.training.step_batch import StepBatch
from trueup.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class VersionScores:
    """Scores [N] in float32; None where the configuration asks for none."""

    own: Tensor | None
    """log π_v: the version that sampled the token."""
    cached: Tensor | None
    """log π_v^cache: behind the keys and values that the engine kept; None if it kept none."""
    before: Tensor | None
    """log π_{v−1}: the version before it, of a share of the episodes scored under their own."""
    again: Tensor | None
    """log π_old a second time, in other micro-batches: its difference is the scorer's noise."""


def versions_needed(config: Config) -> int:
    """How many versions before the trainer's current one `version_scores` and probes may ask for.

    Those a token may be of, the one that a fused update has just left, and the one before all of
    them for the label test. A probe is scored after the step that ran meanwhile.
    """
    if not config.attribution.share:
        return config.sync.delay + 1 if config.probe.every else 0
    return config.staleness_bound + 1 + bool(config.attribution.label_test)


def version_scores(
    batch: StepBatch, target: Tensor, current: int, trainer: Trainer, config: Config
) -> VersionScores:
    """Score what attribution and label test need, as far as the trainer keeps the versions.

    Args:
        batch: The step batch.
        target: [N] log π_old.
        current: Version that it is of, from which the step starts or started.
        trainer: Keeps that version.
        config: Its `attribution` section, and the seed.
    """
    settings = config.attribution
    if not settings.share:
        return VersionScores(own=None, cached=None, before=None, again=None)
    seed = (config.seed * 7919 + current) % 2**63
    lot = torch.rand(len(batch.episodes), generator=torch.Generator().manual_seed(seed))
    of_episode = batch.segment_episode[_segments(batch)]

    def drawn(share: float) -> Tensor:
        """[N] bool; a smaller share is within every larger one."""
        return (lot < share)[of_episode]

    own = _score(batch, target, current, trainer, batch.version, drawn(settings.share))
    before = again = None
    if settings.label_test:
        tested = drawn(settings.share * settings.label_test) & torch.isfinite(own)
        before = _score(batch, target, current, trainer, batch.version - 1, tested)
    if settings.repeat:
        again = _select(batch, trainer, drawn(settings.repeat), current)
    return VersionScores(own=own, cached=_cached(batch, own, trainer), before=before, again=again)


def _score(
    batch: StepBatch,
    target: Tensor,
    current: int,
    trainer: Trainer,
    versions: Tensor,
    where: Tensor,
) -> Tensor:
    """[N] scores of the selected tokens, each under the version given for it."""
    logp = torch.full_like(target, torch.nan)
    for version in distinct(versions[where])[0].tolist():
        here = where & (versions == version)
        scores = target
        if version != current:
            scores = _select(batch, trainer, here, version)
        logp = torch.where(here, scores, logp)
    return logp


def _cached(batch: StepBatch, own: Tensor, trainer: Trainer) -> Tensor | None:
    """[N] as `own`, but behind the cache that several versions wrote."""
    kept = batch.kept_cache
    if not bool(kept.any()):
        return None
    scored = distinct(_segments(batch)[torch.isfinite(own)])[0]
    segments = scored[kept[scored]]
    logp = own.clone()
    part, actions = batch.packed.select(segments), batch.packed.actions_of(segments)
    if len(segments):
        logp[actions] = trainer.score_behind_cache(part, writers(part, batch.version[actions]))
    return logp


def _select(batch: StepBatch, trainer: Trainer, where: Tensor, version: int) -> Tensor:
    """[N] scores of the segments that hold a selected token; NaN if the version is not kept."""
    logp = torch.full_like(batch.logp_behaviour, torch.nan)
    segments = distinct(_segments(batch)[where])[0]
    if len(segments):
        scores = trainer.score(batch.packed.select(segments), version)
        if scores is not None:
            logp[batch.packed.actions_of(segments)] = scores
    return logp


def _segments(batch: StepBatch) -> Tensor:
    """[N] segment of each token."""
    counts = batch.packed.action_offsets.diff()
    return torch.arange(len(counts)).repeat_interleave(counts)
