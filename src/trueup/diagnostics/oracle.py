"""The mixing coefficient with the least mean squared error, from per-sample gradients.

A mixture ĝ(α) = (1 − α)·ĝ₀ + α·ĝ₁ of the uncorrected and the weighted estimate, each a mean over n
samples, has

    MSE(α) = ‖b₀ − α(b₀ − b₁)‖² + [(1−α)²σ₀² + α²σ₁² + 2α(1−α)κ] / n
    α*     = clip[(⟨b₀, b₀−b₁⟩ + (σ₀²−κ)/n) / (‖b₀−b₁‖² + (σ₀²+σ₁²−2κ)/n), 0, 1]

with biases b₀, b₁ of the two and per-sample traces σ₀², σ₁², κ of their covariances. The AIS paper
[Eq. 25, 26] has the same with b₁ = 0 and n = 1: its coefficient is that of a single sample, and is
here only to be compared.

A sample's term is what it adds to the estimate, baseline included: with the mean reward of the
batch as baseline, (r − r̄)·(w·s − mean of w·s) for a score s.

Biases are estimated from samples against the untruncated estimate, over pairs of *different*
samples: ‖mean‖² of the same samples is too large by its own variance, (trace of covariance)/n.

Shapes: n samples, D parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """All that the mean squared error of a mixture depends on."""

    bias: float
    """‖b₀‖² (may come out below 0 when estimated)."""
    bias_product: float
    """⟨b₀, b₀ − b₁⟩."""
    bias_change: float
    """‖b₀ − b₁‖²."""
    plain: float
    """σ₀², trace of the covariance of one uncorrected sample."""
    weighted: float
    """σ₁², of one weighted sample."""
    cross: float
    """κ, trace of the covariance between the two."""

    def error(self, alpha: float, samples: int) -> float:
        """MSE(α) of a mean over n samples."""
        bias = self.bias - 2 * alpha * self.bias_product + alpha**2 * self.bias_change
        spread = (
            (1 - alpha) ** 2 * self.plain
            + alpha**2 * self.weighted
            + 2 * alpha * (1 - alpha) * self.cross
        )
        return bias + spread / samples

    def alpha(self, samples: int) -> float:
        """α*, the minimiser of `error` within [0, 1]."""
        gain = self.bias_product + (self.plain - self.cross) / samples
        curvature = self.bias_change + (self.plain + self.weighted - 2 * self.cross) / samples
        return _clipped(gain, curvature)

    @property
    def alpha_published(self) -> float:
        """Eq. 25: (‖b₀‖² + σ₀² − κ) / (‖b₀‖² + σ₀² + σ₁² − 2κ)."""
        gain = self.bias + self.plain - self.cross
        return _clipped(gain, self.bias + self.plain + self.weighted - 2 * self.cross)

    @property
    def alpha_simplified(self) -> float:
        """Eq. 26: ‖b₀‖² / (‖b₀‖² + σ₁²)."""
        return _clipped(self.bias, self.bias + self.weighted)


def exact_moments(
    plain: Tensor, weighted: Tensor, probability: Tensor, gradient: Tensor
) -> Moments:
    """Moments where every outcome and its probability are known.

    Args:
        plain: [n, D] A·∇ log π of each outcome.
        weighted: [n, D] w̄·A·∇ log π.
        probability: [n] of each outcome under the behaviour policy, summing to 1.
        gradient: [D] exact gradient.
    """
    x, y, p = plain.double(), weighted.double(), probability.double()[:, None]
    mean_x, mean_y = (p * x).sum(0), (p * y).sum(0)
    b0, change = mean_x - gradient.double(), mean_x - mean_y
    return Moments(
        bias=float(b0 @ b0),
        bias_product=float(b0 @ change),
        bias_change=float(change @ change),
        plain=float((p * (x - mean_x).square()).sum()),
        weighted=float((p * (y - mean_y).square()).sum()),
        cross=float((p * (x - mean_x) * (y - mean_y)).sum()),
    )


def sample_moments(
    plain: Tensor, weighted: Tensor, unbiased: Tensor, *, cross_fit: bool = True
) -> Moments:
    """Moments from samples of the behaviour policy, detached.

    Args:
        plain: [n, D] A·∇ log π per sample, n ≥ 2.
        weighted: [n, D] w̄·A·∇ log π.
        unbiased: [n, D] ρ·A·∇ log π, not truncated: its mean stands for the gradient.
        cross_fit: Products of means over pairs of different samples; otherwise over all pairs,
            which is biased upward.
    """
    x, y, z = (t.detach().double() for t in (plain, weighted, unbiased))
    n = len(x)
    away, change = x - z, x - y

    def product(a: Tensor, b: Tensor) -> float:
        """⟨E a, E b⟩."""
        whole = a.sum(0) @ b.sum(0)
        return float((whole - (a * b).sum()) / (n * (n - 1)) if cross_fit else whole / n**2)

    def covariance(a: Tensor, b: Tensor) -> float:
        """Trace of the covariance of one sample."""
        return float(((a - a.mean(0)) * (b - b.mean(0))).sum() / (n - 1))

    return Moments(
        bias=product(away, away),
        bias_product=product(away, change),
        bias_change=product(change, change),
        plain=covariance(x, x),
        weighted=covariance(y, y),
        cross=covariance(x, y),
    )


def _clipped(gain: float, curvature: float) -> float:
    """Minimiser of curvature·α² − 2·gain·α within [0, 1]; 0 where every α is as good."""
    if curvature <= 0:  # estimated moments need not be convex: the better end
        return 1.0 if 2 * gain > curvature else 0.0
    return min(1.0, max(0.0, gain / curvature))
