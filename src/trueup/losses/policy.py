"""The decoupled clipped policy loss, per token.

Two ratios are kept apart [Hilton et al. 2110.00641]: w = π_old/μ corrects which policy sampled, is
detached and fixed for the step batch; r = π_θ/π_old limits how far the update moves and carries the
gradient. Since w ≥ 0 it commutes with the minimum. Bypass, where the clipped ratio is π_θ/μ, is the
same function with log μ as `logp_old` and w = 1. GRPO is the same function with equal bounds, DAPO
the one with unequal ones; what else their names stand for is an aggregation (`losses.reduce`).

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
    """[N] −w · min(r A, clip(r) A), or what the loss has in its place, with gradient; 0 where the
    token is not kept."""
    log_ratio: Tensor
    """[N] log r, detached; 0 where not kept."""
    clipped_high: Tensor
    """[N] bool: A > 0 and r > 1 + ε_hi."""
    clipped_low: Tensor
    """[N] bool: A < 0 and r < 1 − ε_lo."""


@dataclass(frozen=True, kw_only=True)
class Selected:
    """What a loss computes with: 0 where a token is not kept, and gradient only through log r.

    What is not kept is replaced before the exponential, so that no value there, NaN and infinity
    included, reaches the loss or a gradient.
    """

    log_ratio: Tensor
    """[N] log r, with gradient."""
    ratio: Tensor
    """[N] r, with gradient."""
    advantage: Tensor
    """[N] A."""
    weight: Tensor
    """[N] w ≥ 0."""

    @classmethod
    def of(
        cls, logp: Tensor, *, logp_old: Tensor, advantage: Tensor, weight: Tensor, keep: Tensor
    ) -> Selected:
        """Select the kept tokens; arguments as in `policy_loss`."""
        log_ratio = torch.where(keep, logp, 0.0) - torch.where(keep, logp_old, 0.0).detach()
        return cls(
            log_ratio=log_ratio,
            ratio=exp_clamped(log_ratio),
            advantage=torch.where(keep, advantage, 0.0).detach(),
            weight=torch.where(keep, weight, 0.0).detach(),
        )

    def loss(self, per_token: Tensor, *, clip_low: float, clip_high: float) -> PolicyLoss:
        """Terms of these tokens, with which of them lie beyond the bounds."""
        r, a = self.ratio.detach(), self.advantage
        return PolicyLoss(
            per_token=per_token,
            log_ratio=self.log_ratio.detach(),
            clipped_high=(a > 0) & (r > 1 + clip_high),
            clipped_low=(a < 0) & (r < 1 - clip_low),
        )


def policy_loss(
    logp: Tensor,
    *,
    logp_old: Tensor,
    advantage: Tensor,
    weight: Tensor,
    keep: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> PolicyLoss:
    """−w · min(r A, clip(r, 1−ε_lo, 1+ε_hi) A) of each kept token [PPO, 1707.06347].

    The minimum does not bound r A from below where A < 0: a token that has become much likelier
    pushes without limit. Dual clip [1912.09729] replaces it there by max(min(...), c A).

    Args:
        logp: [N] log π_θ, with gradient.
        logp_old: [N] log π_old.
        advantage: [N] A of the token's episode.
        weight: [N] w ≥ 0.
        keep: [N] bool.
        clip_low: ε_lo.
        clip_high: ε_hi.
        dual_clip: c > 1 + ε_hi; 0 for none.
    """
    t = Selected.of(logp, logp_old=logp_old, advantage=advantage, weight=weight, keep=keep)
    a = t.advantage
    gain = torch.minimum(t.ratio * a, t.ratio.clamp(1 - clip_low, 1 + clip_high) * a)
    if dual_clip:
        gain = torch.where(a < 0, torch.maximum(gain, dual_clip * a), gain)
    return t.loss(-t.weight * gain, clip_low=clip_low, clip_high=clip_high)
