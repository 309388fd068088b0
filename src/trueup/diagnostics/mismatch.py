"""How far behaviour and target are apart on the sampled tokens.

d = log π_old − log μ. Estimates of KL(μ‖π) from samples of μ: k1 = −mean d (unbiased, may be
negative), k2 = ½ mean d², k3 = mean(ρ − 1 − d) (unbiased, never negative) [Schulman 2020].

Shapes: N valid action tokens, E episodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.diagnostics.numerics import quantile, safe_mean, to_host
from trueup.gap import PolicyGap, distinct, exp_clamped

PROBABILITY_BINS = (0.0, 0.1, 0.5, 0.9, 1.0)
"""Edges of the behaviour-probability bins, closed below; the last is closed above as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Mismatch of the tokens that fall into one bin."""

    low: float
    """Smallest behaviour probability, or the lag."""
    high: float
    """Largest behaviour probability (exclusive but for 1), or the lag."""
    tokens: int
    abs_mean: float
    """Mean |d| in nats."""
    k3: float
    """KL(μ‖π) in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Distance of two policies on the tokens that one of them sampled; 0 without tokens."""

    tokens: int
    """Action tokens with a known behaviour log-prob."""
    missing: int
    """Action tokens without one."""
    abs_mean: float
    """Mean |d| in nats; so are median, p95, p99 and max."""
    abs_median: float
    abs_p95: float
    abs_p99: float
    abs_max: float
    k1: float
    k2: float
    k3: float
    probability_mean: float
    """E|π − μ| of the sampled token."""
    episode_sum_max: float
    """Largest |Σ d| of an episode in nats."""
    by_probability: tuple[Bin, ...]
    by_lag: tuple[Bin, ...]
    """One bin per lag that occurs, ascending."""


def mismatch(gap: PolicyGap) -> Mismatch:
    """Measure the mismatch over the valid action tokens of a step batch."""
    valid = gap.valid
    target, behaviour = gap.logp_target[valid].double(), gap.logp_behaviour[valid].double()
    d = target - behaviour
    size = d.abs()
    k3 = exp_clamped(d) - 1 - d
    ordered = size.sort().values
    sums = d.new_zeros(gap.num_episodes).index_add(0, gap.episode[valid], d)
    probability = gap.logp_behaviour[valid].exp()  # float32, where the edges are exact
    figures = {
        "abs_mean": safe_mean(size),
        "abs_median": quantile(ordered, 0.5),
        "abs_p95": quantile(ordered, 0.95),
        "abs_p99": quantile(ordered, 0.99),
        "abs_max": quantile(ordered, 1.0),
        "k1": -safe_mean(d),
        "k2": safe_mean(d.square() / 2),
        "k3": safe_mean(k3),
        "probability_mean": safe_mean((target.exp() - behaviour.exp()).abs()),
        "episode_sum_max": sums.abs().max() if len(sums) else d.new_zeros(()),
    }
    edges = torch.tensor(PROBABILITY_BINS[1:-1], device=d.device)
    lags, lag_index = distinct(gap.lag[valid])
    limits = [float(lag) for lag in lags.tolist()]
    return Mismatch(
        tokens=len(d),
        missing=gap.num_tokens - len(d),
        by_probability=_bins(
            torch.bucketize(probability, edges, right=True),
            list(PROBABILITY_BINS[:-1]),
            list(PROBABILITY_BINS[1:]),
            size,
            k3,
        ),
        by_lag=_bins(lag_index, limits, limits, size, k3),
        **dict(zip(figures, to_host(list(figures.values())), strict=True)),
    )


def _bins(
    index: Tensor, low: list[float], high: list[float], size: Tensor, k3: Tensor
) -> tuple[Bin, ...]:
    rows = torch.stack([torch.ones_like(size), size, k3])  # [3, N]
    totals = size.new_zeros(3, len(low)).index_add(1, index, rows)
    return tuple(
        Bin(
            low=bottom,
            high=top,
            tokens=int(count),
            abs_mean=size_sum / max(count, 1.0),
            k3=k3_sum / max(count, 1.0),
        )
        for bottom, top, count, size_sum, k3_sum in zip(low, high, *totals.tolist(), strict=True)
    )
