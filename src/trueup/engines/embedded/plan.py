"""What all layers of a slim forward share about one batch: indices, masks, angles.

Attention sees the rows in two ways. Rows with one query each are batched products: over the cache
itself if they fill most of its leading slots, and over a copy of theirs if not. Rows with several
new tokens are padded among their kind, and those with nothing cached before need no cache at all.

R: rows, M: new tokens, H: query heads, K: key-value heads, G = H/K, D: head dimension, T: positions
attended, N: most new tokens of a row of a kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trueup.engines.embedded.network import Batch, kinds

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from trueup.engines.embedded.cache import SlotCache

_ATTEND_BUCKET = 16
_SPARE_SLOTS = 2.0
"""Slots per row up to which the cache is read in place: an idle slot costs a product of one row, a
copy costs about as much as the products that read it."""
_SPARE_POSITIONS = 3.0
"""Positions per position needed up to which all are attended to: a product of part of them copies
the keys first, at three times its price."""


@dataclass(frozen=True, slots=True)
class Singles:
    """Attention of rows with one query each."""

    rows: int
    """P: products; R, or where they are read in place the leading slots that hold the rows."""
    slots: Tensor | None
    """[2R] as `SlotCache.read` takes them; None: the products are of slots 0 ... P-1, in place."""
    order: Tensor | None
    """[P] row of each slot, where the rows are not slots 0 ... R-1 in order; an idle slot has
    another's."""
    inverse: Tensor | None
    """[R] slot of each row, likewise."""
    attended: int
    mask: Tensor
    """[P·K, G, T] 0 or -inf."""


@dataclass(frozen=True, slots=True)
class Several:
    """Attention of rows with several new tokens, all of one kind."""

    begin: int
    end: int
    """Their packed tokens."""
    rows: int
    pad: Tensor | None
    """[R·N] token, counted from `begin`, at each padded place; None if all rows bring N tokens."""
    unpad: Tensor | None
    """[tokens] padded place of each."""
    slots: Tensor | None
    """[2R] as `SlotCache.read` takes them; None if the rows have nothing cached before."""
    attended: int
    mask: Tensor | None
    """[R, 1, N, T] 0 where a query sees a position, else -inf; None: causal among the new."""


@dataclass(frozen=True, slots=True)
class Last:
    """The rows' last tokens, which alone go on behind the last layer's keys and values."""

    index: Tensor
    """[R] packed index of each."""
    cos: Tensor
    sin: Tensor
    queries: Singles


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a batch that all layers share."""

    tokens: Tensor
    cos: Tensor
    sin: Tensor
    write: Tensor
    singles: Singles | None
    several: list[Several]
    last: Last | None
    """None if every row has one token, or more than the last ones are wanted."""
    outputs: Tensor | None
    """[R] packed index of each row's last token, where `last` has not left the others out."""
    known: Tensor | None
    """[P] packed indices behind which tokens are known; None if there is none."""


class Planner:
    """Turns batches into plans.

    Args:
        cache: Where the keys and values lie.
        cos: [positions, H+K, D] table of `rotary.tables`.
        sin: The same.
        heads: H.
        kv_heads: K.
        dtype: Of the masks: the model's.
    """

    def __init__(
        self,
        cache: SlotCache,
        cos: Tensor,
        sin: Tensor,
        *,
        heads: int,
        kv_heads: int,
        dtype: torch.dtype,
    ) -> None:
        """Remember what all plans share."""
        self._cache = cache
        self._cos = cos
        self._sin = sin
        self._heads = heads
        self._kv_heads = kv_heads
        self._dtype = dtype
        self._device = cos.device

    def plan(self, batch: Batch) -> Plan:
        """Make room in the cache and work out what all layers share."""
        filled = batch.cached + batch.counts
        self._cache.reserve(int(filled.max()))
        singles = batch.singles
        outputs = known = last = None
        if singles == len(batch.slots):
            slots, at = batch.slots, batch.cached
        else:
            slots = np.repeat(batch.slots, batch.counts)
            first = np.cumsum(batch.counts) - batch.counts
            at = np.arange(len(batch.tokens)) + np.repeat(batch.cached - first, batch.counts)
            index = self._tensor(first + batch.counts - 1)
            if batch.known.any():
                outputs, known = index, self._tensor(batch.known_index() - 1)
            else:
                ends = self._tensor(filled - 1)
                last = Last(
                    index=index,
                    cos=self._cos.index_select(0, ends),
                    sin=self._sin.index_select(0, ends),
                    queries=self._queries(batch.slots, filled),
                )
        positions = self._tensor(at)
        return Plan(
            tokens=self._tensor(batch.tokens),
            cos=self._cos.index_select(0, positions),
            sin=self._sin.index_select(0, positions),
            write=self._tensor(self._cache.rows(slots, at)),
            singles=self._queries(batch.slots[:singles], filled[:singles]) if singles else None,
            several=self._several(batch),
            last=last,
            outputs=outputs,
            known=known,
        )

    def _queries(self, slots: NDArray[np.int64], filled: NDArray[np.int64]) -> Singles:
        """One query at the end of every row."""
        rows, attended = len(slots), self._attended(filled)
        leading = int(slots.max()) + 1
        in_place = leading <= _SPARE_SLOTS * rows
        order, seen = None, filled - 1
        if in_place:
            if attended * _SPARE_POSITIONS >= self._cache.positions:
                attended = self._cache.positions
            if leading != rows or (slots[1:] < slots[:-1]).any():
                order = np.zeros(leading, dtype=np.int64)
                order[slots] = np.arange(rows)
                seen = seen[order]
            rows = leading
        groups = self._heads // self._kv_heads
        mask = self._mask(seen[:, None], attended)[:, None, None]
        return Singles(
            rows=rows,
            slots=None if in_place else self._both(slots),
            order=None if order is None else self._tensor(order),
            inverse=None if order is None else self._tensor(slots),
            attended=attended,
            mask=mask.expand(-1, self._kv_heads, groups, -1).reshape(-1, groups, attended),
        )

    def _several(self, batch: Batch) -> list[Several]:
        if batch.singles == len(batch.slots):
            return []
        kind = kinds(batch.cached, batch.counts)
        cuts = np.flatnonzero(kind[1:] != kind[:-1]) + 1
        bounds = [0, *cuts.tolist(), len(kind)]
        ends = np.concatenate(([0], np.cumsum(batch.counts)))
        return [
            self._kind(
                batch.slots[a:b], batch.cached[a:b], batch.counts[a:b], int(ends[a]), int(ends[b])
            )
            for a, b in pairwise(bounds)
            if kind[a]
        ]

    def _kind(
        self,
        slots: NDArray[np.int64],
        cached: NDArray[np.int64],
        counts: NDArray[np.int64],
        begin: int,
        end: int,
    ) -> Several:
        longest = int(counts.max())
        place = np.arange(longest)
        # Padded queries repeat the row's last token, so that they too see something finite.
        within = np.minimum(place, counts[:, None] - 1)
        ragged = len(slots) * longest != end - begin
        fresh = not cached.any()
        attended = self._attended(cached + counts)
        starts = (np.cumsum(counts) - counts)[:, None]
        seen = (cached[:, None] + within)[:, :, None]
        return Several(
            begin=begin,
            end=end,
            rows=len(slots),
            pad=self._tensor((starts + within).reshape(-1)) if ragged else None,
            unpad=self._tensor(np.flatnonzero(place < counts[:, None])) if ragged else None,
            slots=None if fresh else self._both(slots),
            attended=attended,
            mask=None if fresh else self._mask(seen, attended)[:, None],
        )

    def _both(self, slots: NDArray[np.int64]) -> Tensor:
        """[2R] where `SlotCache.read` finds the keys, then the values, of some slots."""
        return self._tensor(np.concatenate((slots, slots + self._cache.slots)))

    def _attended(self, filled: NDArray[np.int64]) -> int:
        """Positions to attend to: the longest row's, rounded up to a bucket."""
        needed = -(-int(filled.max()) // _ATTEND_BUCKET) * _ATTEND_BUCKET
        return min(needed, self._cache.positions)

    def _mask(self, seen: NDArray[np.int64], attended: int) -> Tensor:
        """[..., T] 0 up to and including the last position seen [..., 1], -inf behind it."""
        hidden = self._tensor(np.arange(attended) > seen)
        return torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(
            hidden, -torch.inf
        )

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)
