"""Tokens grouped by what they have in common, and sums over each group.

One scatter serves every breakdown; a breakdown is one line in `BREAKDOWNS`.

Shapes: N action tokens, K groups, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.gap import PolicyGap, distinct

PROBABILITY_BINS = (0.0, 0.1, 0.5, 0.9, 1.0)
"""Edges of the behaviour-probability bins, closed below; the last is closed above as well."""
POSITION_BINS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Edges of the position in an episode: action tokens before it / action tokens."""


_DENSE = 4096
"""Range of integers that are counted to find the distinct ones."""


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """Which group each token is in."""

    index: Tensor
    """[N] int64 in [0, K)."""
    low: tuple[float, ...]
    """[K] least value of each group."""
    high: tuple[float, ...]
    """[K] largest value, exclusive but for that of the last bin; equal to `low` for one value."""

    def sums(self, columns: Tensor) -> Tensor:
        """[C, K] float64 sums over each group of columns [C, N], 0 where a token is left out."""
        size = len(self.low)
        return torch.stack(
            # Of an empty tensor, `bincount` counts in int64 even with weights.
            [
                torch.bincount(self.index, column.double(), minlength=size).double()
                for column in columns
            ]
        )


def by_value(values: Tensor) -> Grouping:
    """A group for each distinct value, ascending."""
    found, index = _distinct(values)
    limits = tuple(float(value) for value in found.tolist())
    return Grouping(index=index, low=limits, high=limits)


def _distinct(values: Tensor) -> tuple[Tensor, Tensor]:
    """As `gap.distinct`; integers close together are counted, which is faster than sorting them."""
    if values.dtype != torch.int64 or not len(values):
        return distinct(values)
    low, high = torch.stack(values.aminmax()).tolist()
    if high - low > _DENSE:
        return distinct(values)
    present = torch.bincount(values - low) > 0
    index = present.cumsum(0) - 1
    return present.nonzero().flatten() + low, index[values - low]


def by_edges(values: Tensor, edges: Sequence[float]) -> Grouping:
    """A group for each bin [edge, next edge); the outer bins also take what lies beyond them."""
    inner = torch.tensor(edges[1:-1], dtype=values.dtype, device=values.device)
    return Grouping(
        index=torch.bucketize(values, inner, right=True),
        low=tuple(edges[:-1]),
        high=tuple(edges[1:]),
    )


def position(gap: PolicyGap) -> Tensor:
    """[N] float32 share of its episode's action tokens that come before each token."""
    counts = torch.zeros_like(gap.group).index_add(0, gap.episode, torch.ones_like(gap.lag))
    before = (
        torch.arange(gap.num_tokens, device=counts.device)
        - (counts.cumsum(0) - counts)[gap.episode]
    )
    return before / counts[gap.episode]


BREAKDOWNS: Mapping[str, Callable[[PolicyGap, Tensor], Grouping]] = {
    "lag": lambda gap, _: by_value(gap.lag),
    "probability": lambda gap, _: by_edges(gap.logp_behaviour.exp(), PROBABILITY_BINS),
    "position": lambda gap, _: by_edges(position(gap), POSITION_BINS),
    "engine": lambda gap, _: by_value(gap.engine),
    "advantage": lambda _, advantage: by_value(advantage.sign().long()),
}
"""Every breakdown by name, from the gap and the advantages [N] of its tokens (0 if unknown)."""
