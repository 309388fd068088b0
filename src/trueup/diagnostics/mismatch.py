"""How far behaviour and target are apart on the sampled tokens.

d = log π_old − log μ. Estimates of KL(μ‖π) from samples of μ: k1 = −mean d (unbiased, may be
negative), k2 = ½ mean d², k3 = mean(ρ − 1 − d) (unbiased, never negative) [Schulman 2020].

Shapes: N valid action tokens, E episodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.diagnostics.calibration import clustered_mean
from trueup.diagnostics.groups import BREAKDOWNS, Grouping
from trueup.diagnostics.metrics import Values
from trueup.diagnostics.numerics import log_mean_exp, safe_mean, to_host
from trueup.diagnostics.sketch import QuantileSketch
from trueup.gap import PolicyGap, exp_clamped


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Mismatch of the tokens that fall into one group."""

    low: float
    """Least value of what was grouped by."""
    high: float
    """Largest value, exclusive but for that of the last bin; `low` where one value is a group."""
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
    """Mean |d| in nats; median, p95, p99 and max are of |d| too, as exact as `sketch` is."""
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
    reverse_kl: float
    """KL(π‖μ) in nats: mean(ρd − ρ + 1)."""
    chi_square: float
    """χ²(π‖μ) of one token: mean ρ² − 1."""
    renyi_episodes: float
    """log(1 + χ²) of the products over an episode, in nats: finite where χ² is not."""
    breakdowns: Mapping[str, tuple[Bin, ...]]
    """By the names of `groups.BREAKDOWNS`, ascending, groups with tokens only."""


def mismatch(gap: PolicyGap, *, advantage: Tensor | None = None) -> Mismatch:
    """Measure the mismatch over the valid action tokens of a step batch.

    Args:
        gap: The step batch.
        advantage: [N] advantages, for the breakdown by their sign; None: that one is empty.
    """
    valid = gap.valid
    target, behaviour = gap.logp_target[valid].double(), gap.logp_behaviour[valid].double()
    d = target - behaviour
    size, ratio = d.abs(), exp_clamped(d)
    k3 = ratio - 1 - d
    sketch = QuantileSketch.of(size)
    sums, seen = gap.episode_sum(gap.log_ratio), gap.episode_sum(valid) > 0
    figures = {
        "abs_mean": safe_mean(size),
        "k1": -safe_mean(d),
        "k2": safe_mean(d.square() / 2),
        "k3": safe_mean(k3),
        "reverse_kl": safe_mean(ratio * d - ratio + 1),
        "chi_square": safe_mean(ratio.square() - 1),
        "renyi_episodes": log_mean_exp(2 * sums[seen]),
        "probability_mean": safe_mean((target.exp() - behaviour.exp()).abs()),
        "episode_sum_max": sums.abs().max() if len(sums) else d.new_zeros(()),
    }
    whole = gap.log_ratio.double()
    columns = torch.stack([valid.double(), whole.abs(), exp_clamped(whole) - 1 - whole])
    known = torch.zeros_like(gap.logp_target) if advantage is None else advantage
    return Mismatch(
        tokens=len(d),
        missing=gap.num_tokens - len(d),
        abs_median=sketch.quantile(0.5) if len(d) else 0.0,
        abs_p95=sketch.quantile(0.95) if len(d) else 0.0,
        abs_p99=sketch.quantile(0.99) if len(d) else 0.0,
        abs_max=sketch.max if len(d) else 0.0,
        breakdowns={
            name: _bins(group(gap, known), columns)
            for name, group in BREAKDOWNS.items()
            if name != "advantage" or advantage is not None
        },
        **dict(zip(figures, to_host(list(figures.values())), strict=True)),
    )


def mismatch_values(gap: PolicyGap) -> Mapping[str, Values]:
    """What the metric table says of the gap itself, without a transfer to the host."""
    valid, d = gap.valid, gap.log_ratio.double()
    ratio = exp_clamped(d)
    behaviour = torch.where(valid, gap.logp_behaviour, gap.logp_target)
    sums, count = gap.episode_sum(d), gap.episode_sum(valid)  # d is 0 where invalid
    seen = count > 0
    return {
        "gap/log_ratio": (d, valid),
        "gap/abs_log_ratio": (d.abs(), valid),
        "gap/k2": (d.square() / 2, valid),
        "gap/k3": (ratio - 1 - d, valid),
        "gap/reverse_kl": (ratio * d - ratio + 1, valid),
        "gap/chi_square": (ratio.square() - 1, valid),
        "gap/renyi_episodes": log_mean_exp(2 * sums[seen]),
        "gap/abs_episode_sum": (sums.abs(), seen),
        "gap/perplexity_ratio": (exp_clamped(-sums / count.clamp(min=1)), seen),
        "gap/entropy": (-ratio * gap.logp_target, valid),
        "gap/probability": ((gap.logp_target.exp() - behaviour.exp()).abs(), valid),
        "gap/behaviour_logp": (behaviour, valid),
        "gap/calibration_z": clustered_mean(gap)[-1],
        "gap/lag": gap.lag,
        "excluded/missing_logp": ~valid,
        "excluded/missing_version": gap.version < 0,
    }


def _bins(grouping: Grouping, columns: Tensor) -> tuple[Bin, ...]:
    """Mismatch of each group with tokens, from columns [3, N] of 1, |d| and k3 of valid tokens."""
    rows = zip(grouping.low, grouping.high, *grouping.sums(columns).tolist(), strict=True)
    return tuple(
        Bin(low=low, high=high, tokens=int(n), abs_mean=size / n, k3=k3 / n)
        for low, high, n, size, k3 in rows
        if n
    )
