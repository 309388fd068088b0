"""Token sequences end to end, without padding, and which of their tokens are actions.

Legend: S segments, T tokens of all segments, N action tokens of all segments. Actions are in the
order of their tokens, so a result [N] lines up with the behaviour log-probs of the segments laid
end to end.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from trueup.errors import DataError
from trueup.gap import distinct
from trueup.types import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Segments as flat tensors (int64, on the CPU).

    Example: segments `[5, 6, 7]` and `[5, 8]`, the last token of each sampled:
    `token_ids=[5, 6, 7, 5, 8]`, `offsets=[0, 3, 5]`, `action_index=[2, 4]`.
    """

    token_ids: Tensor
    """[T] ids of all segments."""
    offsets: Tensor
    """[S+1] first position of each segment, and T."""
    action_index: Tensor
    """[N] positions of the action tokens, increasing."""

    @classmethod
    def pack(cls, token_ids: Sequence[array[int]], action: Sequence[array[int]]) -> Self:
        """Lay sequences end to end.

        Args:
            token_ids: Per segment, its ids (`array('i')`), at least one.
            action: Per segment and token, 1 where the policy sampled it (`array('b')`).

        Raises:
            DataError: An empty segment, unequal lengths, or an action at position 0 (nothing
                precedes it, so it has no log-prob).
        """
        for index, (ids, flags) in enumerate(zip(token_ids, action, strict=True)):
            if not 0 < len(ids) == len(flags):
                raise DataError(
                    field=f"segment {index}",
                    rule="at least one id and a flag for each",
                    value=f"{len(ids)} ids and {len(flags)} flags",
                )
            if flags[0]:
                raise DataError(
                    field=f"segment {index}", rule="no action at position 0", value=ids[0]
                )
        lengths = torch.tensor([len(ids) for ids in token_ids], dtype=torch.long)
        return cls(
            token_ids=_flat(token_ids, torch.int32).long(),
            offsets=_cumulative(lengths),
            action_index=_flat(action, torch.int8).nonzero().flatten(),
        )

    @classmethod
    def from_segments(cls, segments: Sequence[Segment]) -> Self:
        """Lay the segments of episodes end to end; see `pack` for the errors."""
        return cls.pack(
            [segment.token_ids for segment in segments], [segment.action for segment in segments]
        )

    @property
    def lengths(self) -> Tensor:
        """[S] tokens of each segment."""
        return self.offsets.diff()

    @property
    def action_offsets(self) -> Tensor:
        """[S+1] actions before each segment, and N."""
        return torch.searchsorted(self.action_index, self.offsets)

    def actions_of(self, segments: Tensor) -> Tensor:
        """Which of the N actions belong to the given segments, in the order of `segments`."""
        offsets = self.action_offsets
        return _ranges(offsets[segments], offsets.diff()[segments])

    def select(self, segments: Tensor) -> PackedBatch:
        """The batch of the given segments (indices, int64), in that order."""
        lengths = self.lengths[segments]
        offsets = _cumulative(lengths)
        actions = self.actions_of(segments)
        moved = (offsets[:-1] - self.offsets[segments]).repeat_interleave(
            self.action_offsets.diff()[segments]
        )
        return PackedBatch(
            token_ids=self.token_ids[_ranges(self.offsets[segments], lengths)],
            offsets=offsets,
            action_index=self.action_index[actions] + moved,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A part of a batch that one forward holds."""

    batch: PackedBatch
    """The segments of this part."""
    actions: Tensor
    """[n] which of the N actions of the whole batch they hold, in this part's order."""


def microbatches(
    batch: PackedBatch, tokens: int, *, unit: Tensor | None = None
) -> Iterator[MicroBatch]:
    """Split a batch so that each part, right-padded, holds at most `tokens` positions.

    Segments of similar length go together, longest first; a unit longer than `tokens` is a part of
    its own. Every segment is in exactly one part.

    Args:
        batch: What to split.
        tokens: Padded positions of a part.
        unit: [S] int64, equal for segments that must be in one part; None for each by itself.
    """
    lengths = batch.lengths
    if not len(lengths):
        return
    own = torch.arange(len(lengths)) if unit is None else distinct(unit)[1]  # [S] in [0, U)
    rows = torch.bincount(own)
    longest = torch.zeros_like(rows).scatter_reduce(0, own, lengths, "amax")
    order = longest.argsort(descending=True, stable=True)  # [U]
    segments = order.argsort()[own].argsort(stable=True)  # [S] unit by unit
    start = stop = width = 0
    for n, length in zip(rows[order].tolist(), longest[order].tolist(), strict=True):
        if stop > start and (stop - start + n) * width > tokens:
            yield _part(batch, segments[start:stop])
            start = stop
        width = length if stop == start else width
        stop += n
    yield _part(batch, segments[start:stop])


def _part(batch: PackedBatch, segments: Tensor) -> MicroBatch:
    return MicroBatch(batch=batch.select(segments), actions=batch.actions_of(segments))


def _flat(arrays: Sequence[array[int]], dtype: torch.dtype) -> Tensor:
    if not arrays:
        return torch.empty(0, dtype=dtype)
    return torch.cat([torch.frombuffer(item, dtype=dtype) for item in arrays])


def _cumulative(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """The integers of [start, start + length) of every row, end to end."""
    ends = lengths.cumsum(0)
    within = torch.arange(int(lengths.sum())) - (ends - lengths).repeat_interleave(lengths)
    return starts.repeat_interleave(lengths) + within
