"""The gap of each token split by cause, as far as that is identifiable.

d = log π_old − log μ = [log π_old − log π_v] staleness + [log π_v − log μ] engine, where π_v is the
trainer's numerics at the version that sampled the token. Any inserted policy telescopes; this one
means something because only weights change in the first term and only arithmetic in the second.
(Keys and values kept from older versions count as engine.)

Signed means add up, means of |·| do not. A share is E[d_i·d] / E[d²]; shares sum to 1. The floor
of an engine is its own term over all tokens. Intervals are percentile bootstraps over episodes,
because tokens of one episode are not independent.

Shapes: N scored tokens, E episodes, R resamples, 3 parts (total, staleness, engine).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.gap import PolicyGap


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One term of the gap."""

    mean: float
    """Signed mean in nats."""
    abs_mean: float
    """Mean absolute value in nats."""
    share: float
    """E[d_i·d] / E[d²]: its share of the second moment; 0 when there is no gap at all."""
    mean_interval: tuple[float, float]
    share_interval: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Staleness and engine parts of the gap over the scored tokens; all 0 if none is scored."""

    tokens: int
    """Valid action tokens."""
    scored: int
    """Those whose log π_v is known: the ones split here."""
    total: Part
    staleness: Part
    engine: Part
    variance_staleness: float
    """Population variances and covariance of the two parts in nats²."""
    variance_engine: float
    covariance: float

    @property
    def floor(self) -> float:
        """Mean |engine part|: no correction and no synchronisation goes below it."""
        return self.engine.abs_mean


_COLUMNS = 3 + 3 + 3 + 1
"""Sums per episode: parts, |parts|, parts · d, n."""


def attribution(
    gap: PolicyGap, *, resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> Attribution:
    """Split the gap of a step batch by cause.

    Args:
        gap: The step batch; `logp_version` is finite where a token was scored.
        resamples: Bootstrap resamples of the episodes, R ≥ 1.
        level: Coverage of the intervals.
        seed: Of the resampling.
    """
    parts, episode = _parts(gap)  # [3, N] float64, [N]
    d = parts[0]
    rows = torch.cat([parts, parts.abs(), parts * d, torch.ones_like(d)[None]])
    sums = rows.new_zeros(_COLUMNS, gap.num_episodes).index_add(1, episode, rows).T  # [E, 10]
    whole = _moments(sums.sum(0, keepdim=True))  # [1, 9]
    spread = _moments(_resample(sums, resamples, seed))  # [R, 9]
    tail = (1 - level) / 2
    ordered = spread.sort(0).values
    low, high = (ordered[round(share * (len(ordered) - 1))].tolist() for share in (tail, 1 - tail))
    value = whole[0].tolist()
    total, staleness, engine = (
        Part(
            mean=value[i],
            abs_mean=value[3 + i],
            share=value[6 + i],
            mean_interval=(low[i], high[i]),
            share_interval=(low[6 + i], high[6 + i]),
        )
        for i in range(3)
    )
    centred = parts[1:] - parts[1:].mean(1, keepdim=True) if len(d) else parts[1:]
    (stale, cross), (_, inner) = (centred @ centred.T / max(len(d), 1)).tolist()
    return Attribution(
        tokens=int(gap.valid.sum()),
        scored=len(d),
        total=total,
        staleness=staleness,
        engine=engine,
        variance_staleness=stale,
        variance_engine=inner,
        covariance=cross,
    )


def _parts(gap: PolicyGap) -> tuple[Tensor, Tensor]:
    """Total, staleness and engine terms [3, N] of the scored tokens, and their episodes [N]."""
    version = gap.logp_version
    if version is None:
        return gap.logp_target.new_zeros(3, 0).double(), gap.episode[:0]
    scored = gap.valid & torch.isfinite(version)
    # Differences of float32 log-probs are exact in float64, so the parts sum to the total exactly.
    target, middle, behaviour = (
        x[scored].double() for x in (gap.logp_target, version, gap.logp_behaviour)
    )
    return (
        torch.stack([target - behaviour, target - middle, middle - behaviour]),
        gap.episode[scored],
    )


def _resample(sums: Tensor, resamples: int, seed: int) -> Tensor:
    """Sums of R bootstrap samples of the episodes that hold tokens, [R, columns]."""
    held = sums[sums[:, 9] > 0]
    num = len(held)
    if not num:
        return sums.new_zeros(1, sums.shape[1])
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(num, (resamples, num), generator=generator).to(sums.device)
    times = sums.new_zeros(resamples, num).scatter_add(
        1, drawn, sums.new_ones(resamples, num)
    )  # [R, E] how often each episode was drawn
    return times @ held


def _moments(sums: Tensor) -> Tensor:
    """Means, absolute means and shares [R, 9] from sums [R, 10]."""
    count = sums[:, 9:10].clamp(min=1)
    second = sums[:, 6:7]  # Σ d²
    shares = torch.where(second > 0, sums[:, 6:9] / second, 0.0)
    return torch.cat([sums[:, :6] / count, shares], 1)
