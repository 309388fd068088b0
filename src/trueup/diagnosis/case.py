"""Everything that causes are told from: answers, the weights of two versions, a forward.

Legend: S completions, N action tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from trueup.diagnosis.distributions import Distributions, distributions
from trueup.diagnosis.exam import Answers, Version, Wave
from trueup.diagnosis.rollouts import Rollouts
from trueup.diagnosis.scorer import Scorer, Serving, by_version
from trueup.gap import distinct
from trueup.types import KVState


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is known; statistics are computed when a cause asks for them."""

    answers: Answers
    old: Version | None
    """Version u; None if the weights before are not known."""
    new: Version
    """Version v."""
    scorer: Scorer
    """Forward on the grid that the engine claims."""
    plain: Scorer
    """Forward without a grid; the same one where none is claimed."""

    @property
    def rollouts(self) -> Rollouts:
        """What was asked and answered."""
        return self.answers.rollouts

    def serving(self, version: int) -> Serving:
        """What a true label says that was in memory; an unknown version counts as the newest."""
        old = self.old is not None and version == self.old.version
        release = self.old if old and self.old is not None else self.new
        return Serving(weights=release.weights)

    @cached_property
    def told(self) -> Distributions:
        """Distributions that the labels imply."""
        return distributions(self.scorer, self.rollouts, self.serving)

    @cached_property
    def under_old(self) -> Tensor:
        """[N] log-probs under version u, whatever the labels say."""
        assert self.old is not None
        return self.scorer.logp(self.rollouts, Serving(weights=self.old.weights))

    @cached_property
    def under_new(self) -> Tensor:
        """[N] log-probs under version v, whatever the labels say."""
        return self.scorer.logp(self.rollouts, Serving(weights=self.new.weights))

    @cached_property
    def usable(self) -> Tensor:
        """[N] bool: has a log-prob, from a whole support, behind caches of one version."""
        rollouts = self.rollouts
        kept = torch.zeros(len(rollouts.said), dtype=torch.bool)
        for span, tokens in rollouts.tokens_of_spans():
            if span.kv is KVState.KEPT:
                kept[tokens] = True
        return rollouts.known & ~rollouts.truncated & ~kept

    def rows(self, wave: Wave) -> Tensor:
        """[N] bool: tokens of completions of a wave."""
        return self.answers.wave[wave][self.rollouts.row]

    def scored(self, where: Tensor, serve: Callable[[int], Serving]) -> Tensor:
        """[N] the log-probs that labels imply, but for some tokens under what `serve` says.

        Args:
            where: [N] bool, the tokens.
            serve: What was in memory, by the version that a token names.
        """
        return self._on(where, lambda part: by_version(self.scorer, part, serve))

    def behind(self, cached: Tensor) -> Tensor:
        """[N] as labelled, but behind keys and values of version u.

        Args:
            cached: [S] int64 how many positions of each sequence have them; 0 for none.
        """
        assert self.old is not None
        old, new = Serving(weights=self.old.weights), Serving(weights=self.new.weights)
        rows = cached[self.rollouts.row] > 0
        where = rows & self.labelled_new

        def score(part: Rollouts) -> Tensor:
            return self.scorer.behind(part, old, new, cached[rows_of])

        rows_of = distinct(self.rollouts.row[where])[0]
        found = self._on(where, score)
        return torch.where(torch.isfinite(found), found, self.told.logp)

    def held(self, wave: Wave) -> Tensor:
        """[S] positions of a wave that a cache may hold since version u; 0 elsewhere."""
        return torch.where(self.answers.wave[wave], torch.tensor(self.answers.cached), 0)

    def _on(self, where: Tensor, score: Callable[[Rollouts], Tensor]) -> Tensor:
        """[N] as labelled, but for some tokens what `score` gives for their completions."""
        found = self.told.logp.clone()
        rows = distinct(self.rollouts.row[where])[0]
        if len(rows):
            actions = self.rollouts.packed.actions_of(rows)
            scores = score(self.rollouts.select(rows.tolist()))
            found[actions] = torch.where(where[actions], scores, found[actions])
        return found

    def under(self, serving: Serving) -> Tensor:
        """[N] tokens of version v as if something else had been in memory; others as labelled."""
        return self.scored(self.labelled_new, lambda _: serving)

    @cached_property
    def labelled_new(self) -> Tensor:
        """[N] bool: tokens that are not labelled as version u."""
        old = self.old
        return torch.ones_like(self.usable) if old is None else self.rollouts.version != old.version

    @cached_property
    def by_claim(self) -> Tensor:
        """[N] log-probs without the claimed grid."""
        return by_version(self.plain, self.rollouts, self.serving)
