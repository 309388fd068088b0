"""The decoupled clipped policy loss, per token.

Two ratios are kept apart [Hilton et al. 2110.00641]: w = π_old/μ corrects which policy sampled, is
detached and fixed for the step batch; r = π_θ/π_old limits how far the update moves and carries the
gradient. Since w ≥ 0 it commutes with the minimum. Bypass, where the clipped ratio is π_θ/μ, is the
same function with log μ as `logp_old` and w = 1.

Shapes: N action tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.gap import exp_clamped


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """Loss terms of tokens, before the reduction."""

    per_token: Tensor
    """[N] −w · min(r A, clip(r) A), with gradient; 0 where the token is not kept."""
    log_ratio: Tensor
    """[N] log r, detached; 0 where not kept."""
    clipped_high: Tensor
    """[N] bool: A > 0 and r > 1 + ε_hi."""
    clipped_low: Tensor
    """[N] bool: A < 0 and r < 1 − ε_lo."""


def policy_loss(
    logp: Tensor,
    *,
    logp_old: Tensor,
    advantage: Tensor,
    weight: Tensor,
    keep: Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """−w · min(r A, clip(r, 1−ε_lo, 1+ε_hi) A) of each kept token.

    What is not kept is replaced before the exponential, so that no value there, NaN and infinity
    included, reaches the loss or a gradient.

    Args:
        logp: [N] log π_θ, with gradient.
        logp_old: [N] log π_old.
        advantage: [N] A of the token's episode.
        weight: [N] w ≥ 0.
        keep: [N] bool.
        clip_low: ε_lo.
        clip_high: ε_hi.
    """
    log_ratio = torch.where(keep, logp, 0.0) - torch.where(keep, logp_old, 0.0).detach()
    ratio = exp_clamped(log_ratio)
    a = torch.where(keep, advantage, 0.0).detach()
    w = torch.where(keep, weight, 0.0).detach()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    r = ratio.detach()
    return PolicyLoss(
        per_token=-w * torch.minimum(ratio * a, bounded * a),
        log_ratio=log_ratio.detach(),
        clipped_high=(a > 0) & (r > 1 + clip_high),
        clipped_low=(a < 0) & (r < 1 - clip_low),
    )
