"""A step batch with its correction, as the update's micro-batches ask for it.

Two ways lead to the same numbers. `Scored`: log π_old of every token was scored before the update,
and the correction is frozen. `Fused`: there is one optimiser step, so π_old is π_θ of the update's
own forward, and no scoring pass is needed; a micro-batch is corrected by itself, which gives its
part of the whole correction as long as it holds whole units of what the preset must know.
docs/design/fusion.md argues it.

Shapes: N action tokens of the step batch, n of a micro-batch, S segments, E episodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from trueup.config import TrainConfig
from trueup.corrections.base import Correction
from trueup.corrections.preset import Scope
from trueup.gap import PolicyGap
from trueup.losses.reduce import aggregation

Correct = Callable[[PolicyGap], Correction]
"""From the gap of a step batch to its correction."""
CorrectPart = Callable[[PolicyGap, Tensor | None], Correction]
"""The same for whole units of it, without metrics; with [E] bool which episodes are in the
baselines, where a part does not hold enough of their tokens to say so."""


@dataclass(frozen=True, kw_only=True)
class LossTokens:
    """What the loss of tokens needs besides log π_θ, detached."""

    logp_old: Tensor
    """[n] what the ratio is taken to: log π_old, or log μ in bypass mode."""
    advantage: Tensor
    """[n]."""
    weight: Tensor
    """[n] ≥ 0."""
    keep: Tensor
    """[n] bool."""
    share: Tensor
    """[n] of each token in the aggregate; Z is one number for the step batch."""

    @classmethod
    def of(cls, gap: PolicyGap, correction: Correction, settings: TrainConfig) -> LossTokens:
        """Those of a gap that holds whole episodes, or of any where shares are equal."""
        return cls(
            logp_old=gap.logp_behaviour if settings.mode == "bypass" else gap.logp_target,
            advantage=correction.advantages,
            weight=correction.weight,
            keep=correction.keep,
            share=aggregation(
                settings.aggregation,
                counted=correction.counts,
                episode=gap.episode,
                num_episodes=gap.num_episodes,
                constant=settings.sequence_constant,
            ).share,
        )

    def at(self, index: Tensor) -> LossTokens:
        """Some of them, in the order of the index."""
        return LossTokens(
            logp_old=self.logp_old[index],
            advantage=self.advantage[index],
            weight=self.weight[index],
            keep=self.keep[index],
            share=self.share[index],
        )


class Corrected(Protocol):
    """A step batch for a trainer."""

    @property
    def segment_episode(self) -> Tensor:
        """[S] the episode of each segment."""
        ...

    @property
    def num_episodes(self) -> int:
        """E."""
        ...

    @property
    def unit(self) -> Tensor | None:
        """[S] equal for segments that must go forward together; None: any may."""
        ...

    @property
    def gap(self) -> PolicyGap:
        """Of the whole; once every token has been asked for."""
        ...

    @property
    def correction(self) -> Correction:
        """Of the whole; once every token has been asked for."""
        ...

    def wants(self, index: Tensor) -> bool:
        """Whether these tokens have to go forward."""
        ...

    def tokens(self, index: Tensor, logp: Tensor) -> LossTokens:
        """What the loss needs of these tokens, whose log π_θ is [n] `logp`."""
        ...


class Scored:
    """A step batch that was scored before the update."""

    unit = None

    def __init__(self, gap: PolicyGap, correction: Correction, settings: TrainConfig) -> None:
        """The correction is that of the gap."""
        self.gap = gap
        self.correction = correction
        self.segment_episode = gap.segment_episode
        self.num_episodes = gap.num_episodes
        self._tokens = LossTokens.of(gap, correction, settings)

    def wants(self, index: Tensor) -> bool:
        """Only what is in the loss."""
        return bool(self.correction.keep[index].any())

    def tokens(self, index: Tensor, logp: Tensor) -> LossTokens:
        """The frozen correction's."""
        return self._tokens.at(index)


class Fused:
    """A step batch whose log π_old is that of the update's own forward.

    Args:
        gap: Its gap with any target log-probs.
        correct: Corrects it.
        correct_part: Corrects any part of it that holds whole units, in the same way.
        scope: Of the correction.
        settings: The `train` section, with one optimiser step per step batch.
    """

    def __init__(
        self,
        gap: PolicyGap,
        *,
        correct: Correct,
        correct_part: CorrectPart,
        scope: Scope,
        settings: TrainConfig,
    ) -> None:
        """No token has gone forward yet."""
        assert settings.minibatches == 1, "a second update would not start from π_old"
        assert scope != "batch", "a micro-batch does not know the step batch"
        self.segment_episode = gap.segment_episode
        self.num_episodes = gap.num_episodes
        self._template = gap
        self._correct = correct
        self._correct_part = correct_part
        self._scope = scope
        self._settings = settings
        self._target = torch.full_like(gap.logp_target, torch.nan)

    @cached_property
    def unit(self) -> Tensor | None:
        """Groups, episodes, or nothing."""
        if self._scope == "group":
            return self._template.group[self.segment_episode]
        if self._scope == "sequence" or self._settings.aggregation == "sequence_mean":
            return self.segment_episode
        return None

    @cached_property
    def gap(self) -> PolicyGap:
        """Of the whole, with log π_old as it was in the update."""
        return replace(self._template, logp_target=self._target)

    @cached_property
    def correction(self) -> Correction:
        """Of the whole: what its parts were corrected by, with its denominator and statistics."""
        return self._correct(self.gap)

    def wants(self, index: Tensor) -> bool:
        """All: log π_old of every token is recorded."""
        return len(index) > 0

    def tokens(self, index: Tensor, logp: Tensor) -> LossTokens:
        """Correct these tokens by themselves."""
        self._target[index] = logp
        here, back = index.sort()
        part = replace(self._template.select(here), logp_target=logp[back])
        baseline = None if self._scope == "group" else self._known
        correction = self._correct_part(part, baseline)
        return LossTokens.of(part, correction, self._settings).at(back.argsort())

    @cached_property
    def _known(self) -> Tensor:
        """[E] bool: the episodes of the baseline, which no ratio changes below scope `group`."""
        gap = self._template
        return torch.zeros_like(gap.group).index_add(0, gap.episode, gap.valid.long()) > 0
