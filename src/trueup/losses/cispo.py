"""CISPO: REINFORCE with the ratio of the update as a clipped, detached weight [2506.13585].

PPO's minimum takes the gradient away from a token whose ratio left the bounds; here the token keeps
its gradient and only its weight is bounded, so that rare tokens that matter go on teaching. The
ratio is bounded by 1 + ε_hi as everywhere; where ε names the bound itself, 5 there is 4 here.

Shapes: N action tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueup.losses.policy import PolicyLoss, Selected

if TYPE_CHECKING:
    from torch import Tensor


def cispo_loss(
    logp: Tensor,
    *,
    logp_old: Tensor,
    advantage: Tensor,
    weight: Tensor,
    keep: Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """−w · sg(clip(r, 1−ε_lo, 1+ε_hi)) · A · log r of each kept token; arguments as `policy_loss`.

    log r instead of log π_θ: the same gradient, and 0 at the start of an update.
    """
    t = Selected.of(logp, logp_old=logp_old, advantage=advantage, weight=weight, keep=keep)
    bounded = t.ratio.detach().clamp(1 - clip_low, 1 + clip_high)
    terms = -t.weight * bounded * t.advantage * t.log_ratio
    return t.loss(terms, clip_low=clip_low, clip_high=clip_high)
