"""The identity that needs no model of the gap: E_μ[π/μ] = 1.

It holds for every token before any selection, whatever the policies are. A mean ratio far from 1,
measured against its own standard error, therefore means a bug (temperature, an off-by-one shift, a
wrong version, truncated support) and not drift. Feed it *all* finished tokens, not the kept ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.gap import PolicyGap, exp_clamped

_ROUNDING = 1e-6
"""Least standard error, the rounding of float32 log-probs: equal ratios have a finite z."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Mean ratio with its standard error clustered by episode."""

    tokens: int
    episodes: int
    """Episodes with a valid action token."""
    ratio_mean: float
    """Mean ρ; 1 without tokens."""
    standard_error: float
    """Of `ratio_mean`; 0 with fewer than two episodes, where it does not exist."""
    z: float
    """(ratio_mean − 1) / standard_error; 0 with fewer than two episodes."""


def calibration(gap: PolicyGap) -> Calibration:
    """Test E_μ[ρ] = 1 over the valid action tokens; see `clustered_mean`."""
    tokens, episodes, mean, error, z = torch.stack(clustered_mean(gap)).tolist()
    return Calibration(
        tokens=int(tokens), episodes=int(episodes), ratio_mean=mean, standard_error=error, z=z
    )


def clustered_mean(gap: PolicyGap) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens, episodes, mean ratio, its standard error and z, on the gap's device in float64.

    The mean is a ratio of sums over episodes, Σ S_e / Σ n_e, with the linearised standard error
    √(E/(E−1) · Σ (S_e − mean · n_e)²) / Σ n_e.
    """
    ratio = torch.where(gap.valid, exp_clamped(gap.log_ratio.double()), 0.0)
    sums, counts = gap.episode_sum(ratio), gap.episode_sum(gap.valid)
    tokens, episodes = counts.sum(), (counts > 0).sum().double()
    mean = torch.where(tokens > 0, sums.sum() / tokens.clamp(min=1), 1.0)
    spread = (sums - mean * counts).square().sum().sqrt() / tokens.clamp(min=1)
    error = (episodes / (episodes - 1).clamp(min=1)).sqrt() * spread
    defined = episodes >= 2
    error = torch.where(defined, error.clamp(min=_ROUNDING), 0.0)
    z = torch.where(defined, (mean - 1) / error, 0.0)
    return tokens, episodes, mean, error, z
