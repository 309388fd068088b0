"""From the episodes of a step to packed tensors, checked once at this boundary.

Legend: E episodes, S segments, N action tokens, ordered by episode, segment, position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.errors import DataError
from trueup.gap import PolicyGap
from trueup.models.packed import PackedBatch
from trueup.types import Episode, KVState, LogprobKind, Segment, Span


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """The episodes that one step consumes, as tensors."""

    episodes: tuple[Episode, ...]
    """[E] graded ones only."""
    packed: PackedBatch
    segment_episode: Tensor
    """[S] int64."""
    logp_behaviour: Tensor
    """[N] float32, NaN where missing."""
    version: Tensor
    """[N] int64."""
    engine: Tensor
    """[N] int64, index into `engines`."""
    engines: tuple[str, ...]
    turn: Tensor
    """[N] int64, within the episode."""
    reward: Tensor
    """[E] float32."""
    group: Tensor
    """[E] int64."""
    finished_version: Tensor
    """[E] int64: trainer's version when the episode finished."""

    @classmethod
    def collect(cls, episodes: Sequence[Episode], finished_versions: Sequence[int]) -> StepBatch:
        """Pack episodes.

        Raises:
            DataError: An episode without reward, log-probs or spans that do not cover its action
                tokens, or estimated log-probs. The episode is named.
        """
        for episode in episodes:
            _check(episode)
        segments = [(e, s) for e, episode in enumerate(episodes) for s in episode.segments]
        spans = [span for _, segment in segments for span in segment.spans]
        lengths = torch.tensor([span.stop - span.start for span in spans], dtype=torch.int64)
        engines = tuple(sorted({span.engine for span in spans}))
        return cls(
            episodes=tuple(episodes),
            packed=PackedBatch.from_segments([segment for _, segment in segments]),
            segment_episode=torch.tensor([e for e, _ in segments], dtype=torch.int64),
            logp_behaviour=torch.cat(
                [torch.zeros(0)] + [torch.tensor(segment.logp_behaviour) for _, segment in segments]
            ),
            version=_per_token([span.version for span in spans], lengths),
            engine=_per_token([engines.index(span.engine) for span in spans], lengths),
            engines=engines,
            turn=torch.tensor(_turns_of_actions(segments), dtype=torch.int64),
            reward=torch.tensor([episode.reward for episode in episodes], dtype=torch.float32),
            group=torch.tensor([episode.group for episode in episodes], dtype=torch.int64),
            finished_version=torch.tensor(finished_versions, dtype=torch.int64),
        )

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.logp_behaviour)

    @property
    def kept_cache(self) -> Tensor:
        """[S] bool: some of its tokens were sampled behind keys and values of older versions."""
        return torch.tensor(
            [
                any(span.kv is KVState.KEPT for span in segment.spans)
                for episode in self.episodes
                for segment in episode.segments
            ],
            dtype=torch.bool,
        )

    def gap(
        self,
        logp_target: Tensor,
        logp_version: Tensor | None,
        trainer_version: int,
        logp_cache: Tensor | None = None,
    ) -> PolicyGap:
        """The gap of this batch, given the trainer's scores.

        Args:
            logp_target: [N] log π_old.
            logp_version: [N] log π_v, NaN where not scored; or None.
            trainer_version: Version that the step starts from.
            logp_cache: [N] log π_v^cache, NaN where not scored; None: no cache was kept.
        """
        return PolicyGap(
            logp_target=logp_target,
            logp_behaviour=self.logp_behaviour,
            segment_offsets=self.packed.action_offsets,
            segment_episode=self.segment_episode,
            group=self.group,
            reward=self.reward,
            version=self.version,
            lag=trainer_version - self.version,
            engine=self.engine,
            logp_version=logp_version,
            logp_cache=logp_cache,
            turn=self.turn,
        )


def _turns_of_actions(segments: Sequence[tuple[int, Segment]]) -> list[int]:
    return [
        turn
        for _, segment in segments
        for turn, action in zip(segment.turn, segment.action, strict=True)
        if action
    ]


def _per_token(values: Sequence[int], lengths: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).repeat_interleave(lengths)


def _check(episode: Episode) -> None:
    if episode.reward is None:
        raise DataError(field=f"reward of episode {episode.id}", rule="graded", value=None)
    for segment in episode.segments:
        covered = _covered(episode, segment.spans)
        actions, logps = sum(segment.action), len(segment.logp_behaviour)
        if not actions == logps == covered:
            raise DataError(
                field=f"episode {episode.id}",
                rule="one log-prob and one span position per action token",
                value=f"{actions} action tokens, {logps} log-probs, {covered} covered by spans",
            )


def _covered(episode: Episode, spans: Sequence[Span]) -> int:
    """Action tokens whose provenance the spans tell."""
    covered = 0
    for span in spans:
        if span.start != covered or span.stop <= span.start:
            raise DataError(
                field=f"spans of episode {episode.id}", rule="without gap or overlap", value=span
            )
        if span.logprob_kind is not LogprobKind.EXACT:
            raise DataError(
                field=f"log-probs of episode {episode.id}", rule="exact", value=span.logprob_kind
            )
        covered = span.stop
    return covered
