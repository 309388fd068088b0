"""Over what a ratio is taken: a token, or something longer whose log-ratios add up.

"Sequence" alone names no level: product and geometric mean are both called so in the field. A level
is how per-token values become one value, so that a log-ratio and a divergence estimate are taken at
the same levels. All in log space: a product over a thousand tokens neither overflows nor becomes
equal to another by clamping. Sums are in float64.

Tokens without a known behaviour log-prob are left out: an episode of nine known tokens and one
unknown is an episode of nine.

Shapes: N action tokens, U units (episodes or turns).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trueup.errors import DataError
from trueup.gap import PolicyGap, run_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of a ratio. To add one: a constant in this module."""

    name: str
    formula: str
    """The log-ratio at this level in terms of d."""
    whole_episode: bool
    """All tokens of an episode share the value: what a filter rejects, it rejects whole."""
    of: Callable[[PolicyGap, Tensor], Tensor]
    """From a value per token, 0 where log μ is missing, to the value at this level: [N] -> [N],
    given to each token that shares it."""

    def log_ratio(self, gap: PolicyGap) -> Tensor:
        """[N] log-ratio at this level."""
        return self.of(gap, gap.log_ratio)


def _spread(gap: PolicyGap, values: Tensor, length: Tensor, how: Literal["sum", "mean"]) -> Tensor:
    total = run_sums(values, length)
    if how == "mean":
        total = total / run_sums(gap.valid, length).clamp(min=1)
    return total.to(values.dtype).repeat_interleave(length, output_size=len(values))


def _extreme(gap: PolicyGap, values: Tensor, how: Literal["amin", "amax"]) -> Tensor:
    known = gap.valid
    found = values.new_zeros(gap.num_episodes)
    found = found.scatter_reduce(0, gap.episode[known], values[known], how, include_self=False)
    return found[gap.episode]


def _turn(gap: PolicyGap) -> Tensor:
    """[N] index of each token's turn, counted through the step batch."""
    if gap.turn is None:
        raise DataError(
            field="turn", rule="given for a correction at the level of turns", value=None
        )
    changes = (gap.episode.diff() != 0) | (gap.turn.diff() != 0)
    return torch.cat([gap.episode.new_zeros(min(1, gap.num_tokens)), changes.long().cumsum(0)])


def _scan(values: Tensor, episode: Tensor, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Inclusive prefix reduction within each episode, in log2(longest episode) passes."""
    step, found = 1, values
    while step < len(found):
        together = episode[step:] == episode[:-step]
        if not bool(together.any()):
            break
        joined = torch.where(together, join(found[step:], found[:-step]), found[step:])
        found, step = torch.cat([found[:step], joined]), 2 * step
    return found


def _least_prefix(gap: PolicyGap, values: Tensor) -> Tensor:
    sums = _scan(values.double(), gap.episode, torch.add)
    return _scan(sums, gap.episode, torch.minimum).to(values.dtype)


TOKEN = Level(name="token", formula="d_t", whole_episode=False, of=lambda gap, x: x)
PRODUCT = Level(
    name="product",
    formula="Σ_t d_t over the episode",
    whole_episode=True,
    of=lambda gap, x: _spread(gap, x, gap.length, "sum"),
)
GEOMETRIC = Level(
    name="geometric",
    formula="Σ_t d_t / T over the episode",
    whole_episode=True,
    of=lambda gap, x: _spread(gap, x, gap.length, "mean"),
)
LEAST = Level(
    name="least",
    formula="min_t d_t over the episode",
    whole_episode=True,
    of=lambda gap, x: _extreme(gap, x, "amin"),
)
LARGEST = Level(
    name="largest",
    formula="max_t d_t over the episode",
    whole_episode=True,
    of=lambda gap, x: _extreme(gap, x, "amax"),
)
TURN_PRODUCT = Level(
    name="turn product",
    formula="Σ_t d_t over the turn",
    whole_episode=False,
    of=lambda gap, x: _spread(gap, x, _turn(gap).bincount(), "sum"),
)
TURN_GEOMETRIC = Level(
    name="turn geometric",
    formula="Σ_t d_t / T over the turn",
    whole_episode=False,
    of=lambda gap, x: _spread(gap, x, _turn(gap).bincount(), "mean"),
)
PREFIX_MIN = Level(
    name="prefix-min",
    formula="min over s ≤ t of Σ_{u ≤ s} d_u",
    whole_episode=False,
    of=_least_prefix,
)
