"""How many versions lie between sampling and learning.

The lag of a token is the trainer's version when the step that consumes it starts minus the version
that sampled it. Versions published while the episode ran are lag *in flight*; those published while
it waited for the trainer are lag *in queue*.

Shapes: N action tokens, E episodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.diagnostics.numerics import safe_mean, to_host
from trueup.errors import DataError
from trueup.gap import PolicyGap, distinct


@dataclass(frozen=True, kw_only=True)
class Staleness:
    """Lags of a step batch in versions, over valid action tokens; 0 where there are none."""

    tokens: int
    mean: float
    """Token-weighted mean lag."""
    max: int
    histogram: tuple[tuple[int, int], ...]
    """(lag, tokens), ascending, lags that occur."""
    in_flight: float | None
    """Part of `mean` that arose while episodes ran; None if not asked for."""
    in_queue: float | None
    """Part of `mean` that arose while episodes waited."""
    episode_tokens: Tensor
    """[E] int64 valid action tokens."""
    episode_mean: Tensor
    """[E] float64 token-weighted mean lag."""
    episode_max: Tensor
    """[E] int64."""
    episode_start: Tensor
    """[E] int64 lag of the first action token."""


def staleness(gap: PolicyGap, *, queued: Tensor | None = None) -> Staleness:
    """Measure the lags of a step batch.

    Args:
        gap: The step batch.
        queued: [E] int64, versions published between an episode's end and its consumption.

    Raises:
        DataError: A token would have sampled with a version newer than its episode's end.
    """
    episode, lag = gap.episode[gap.valid], gap.lag[gap.valid]
    zeros = torch.zeros_like(gap.group)
    counts = zeros.index_add(0, episode, torch.ones_like(lag))
    sums = zeros.index_add(0, episode, lag)
    lags, index = distinct(lag)
    tokens = torch.bincount(index, minlength=len(lags))
    has_tokens = counts > 0
    start = zeros.clone()
    start[has_tokens] = lag[counts.cumsum(0)[has_tokens] - counts[has_tokens]]
    waited = None if queued is None else queued[episode]
    if waited is not None and bool((waited > lag).any()):
        raise DataError(
            field="queued", rule="<= the lag of each token", value=int((waited - lag).max())
        )
    mean, in_queue = to_host([safe_mean(lag), safe_mean(lag if waited is None else waited)])
    return Staleness(
        tokens=len(lag),
        mean=mean,
        max=int(lags[-1]) if len(lags) else 0,
        histogram=tuple(zip(lags.tolist(), tokens.tolist(), strict=True)),
        in_flight=None if waited is None else mean - in_queue,
        in_queue=None if waited is None else in_queue,
        episode_tokens=counts,
        episode_mean=sums.double() / counts.clamp(min=1),
        episode_max=zeros.scatter_reduce(0, episode, lag, "amax"),
        episode_start=start,
    )
