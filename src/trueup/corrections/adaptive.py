"""Adaptive importance sampling: how much correction a step batch gets depends on what it is worth.

w̄ = min(ρ, C); weight = 1 + α(w̄ − 1), within [1 − α, 1 + α(C − 1)]; and

    α = clip(α_ess − β·α_var, 0, 1) · α_mis
    α_ess = (1 + CV²(w̄))^(−1/2) = √(ESS/n)      reliability: are the weights degenerate?
    α_var = max(0, (Δσ − γ)/γ)                   inflation: do they add gradient noise?
    Δσ = std(A·w̄) / (std(A) + 1e-6)
    α_mis = min(1, mean |d| / δ)                 necessity: is there anything to correct?

Over the kept action tokens of the step batch, so that mini-batches do not matter. Standard
deviations are population ones (ddof 0), so that one token has CV 0. The method leaves β open; here
it is 1.
Without spread of the advantages, Δσ is √(E[A²w̄²] / E[A²]), and 0 when all of them are 0.

Shapes: N action tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.corrections.preset import Constants, Ratios, Weights
from trueup.corrections.truncated import truncated

_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """Weights of a step batch with the coefficient that made them, float64, detached."""

    weight: Tensor
    """[N]."""
    alpha: Tensor
    """[] in [0, 1]."""
    reliability: Tensor
    """[] α_ess in (0, 1]."""
    necessity: Tensor
    """[] α_mis in [0, 1]."""
    inflation: Tensor
    """[] α_var ≥ 0."""


def adaptive(
    log_ratio: Tensor, advantage: Tensor, *, cap: float, delta: float, gamma: float, beta: float
) -> Adaptive:
    """Mix correction into each token's weight.

    Args:
        log_ratio: [N] d of the tokens that take part.
        advantage: [N] A, not yet weighted.
        cap: C ≥ 1.
        delta: δ > 0 in nats, the mismatch from which the correction is fully needed.
        gamma: γ > 0, the growth of std(A·w̄) that is tolerated.
        beta: β ≥ 0, sensitivity to growth beyond it.
    """
    d, a = log_ratio.detach().double(), advantage.detach().double()
    w = truncated(d, cap=cap)
    if not len(d):
        one, zero = d.new_ones(()), d.new_zeros(())
        return Adaptive(weight=w, alpha=zero, reliability=one, necessity=zero, inflation=zero)
    cv_squared = w.var(correction=0) / w.mean().square()
    reliability = (1 + cv_squared).rsqrt()
    necessity = (d.abs().mean() / delta).clamp(max=1.0)
    inflation = ((_noise_growth(a, w) - gamma) / gamma).clamp(min=0.0)
    alpha = (reliability - beta * inflation).clamp(0.0, 1.0) * necessity
    return Adaptive(
        weight=1 + alpha * (w - 1),
        alpha=alpha,
        reliability=reliability,
        necessity=necessity,
        inflation=inflation,
    )


def _noise_growth(a: Tensor, w: Tensor) -> Tensor:
    """Δσ."""
    spread = (a * w).std(correction=0) / (a.std(correction=0) + _EPSILON)
    second = a.square().mean()
    flat = ((a * w).square().mean() / torch.where(second > 0, second, 1.0)).sqrt()
    # Equality, not std > 0: the std of equal numbers may round to something above 0.
    return torch.where(a.max() == a.min(), flat, spread)


def adaptive_weights(ratios: Ratios, constants: Constants) -> Weights:
    """1 + α(min(ρ, cap) − 1) over the kept tokens."""
    keep = ratios.keep
    mixed = adaptive(ratios.log_ratio[keep], ratios.advantage[keep], **constants)
    weight = torch.ones_like(ratios.log_ratio)
    weight[keep] = mixed.weight.float()
    return Weights(
        weight=weight,
        factors={
            "adaptive/alpha": mixed.alpha,
            "adaptive/reliability": mixed.reliability,
            "adaptive/necessity": mixed.necessity,
            "adaptive/inflation": mixed.inflation,
        },
    )
