"""Adaptive importance sampling: how much correction a step batch gets depends on what it is worth.

w̄ = min(ρ, C); weight = 1 + α(w̄ − 1), within [1 − α, 1 + α(C − 1)]; and

    α = clip(α_ess − β·α_var, 0, 1) · α_mis
    α_ess = (1 + CV²(w̄))^(−1/2) = √(ESS/n)      reliability: are the weights degenerate?
    α_var = max(0, (Δσ − γ)/γ)                   inflation: do they add gradient noise?
    Δσ = std(A·w̄) / (std(A) + 1e-6)
    α_mis = min(1, max(0, mean |d| − floor)/δ)   necessity: is there anything to correct?

Over the kept action tokens of the step batch, so that mini-batches do not matter; or, beyond the
paper, over those of one lag or one episode, each with an α of its own. Standard deviations are
population ones (ddof 0), so that one token has CV 0. The method leaves β open; here it is 1. It
knows no floor, which is 0 here unless set: with the floor of a bfloat16 engine (mean |d| ≈ .03)
its α_mis is always 1.
Without spread of the advantages, as in a single episode, Δσ is √(E[A²w̄²] / E[A²]), and 0 when all
of them are 0.

Shapes: N action tokens, K parts with an α each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.corrections.levels import TOKEN
from trueup.corrections.preset import Constant, Constants, Preset, Ratios, Scope, Weights
from trueup.corrections.truncated import truncated
from trueup.gap import PolicyGap, distinct

_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """Weights of a step batch with the coefficients that made them, float64, detached."""

    weight: Tensor
    """[N]."""
    alpha: Tensor
    """[K] in [0, 1]."""
    reliability: Tensor
    """[K] α_ess in (0, 1]."""
    necessity: Tensor
    """[K] α_mis in [0, 1]."""
    inflation: Tensor
    """[K] α_var ≥ 0."""


def adaptive(
    log_ratio: Tensor,
    advantage: Tensor,
    *,
    cap: float,
    delta: float,
    gamma: float,
    beta: float,
    floor: float = 0.0,
    part: Tensor | None = None,
) -> Adaptive:
    """Mix correction into each token's weight.

    Args:
        log_ratio: [N] d of the tokens that take part.
        advantage: [N] A, not yet weighted.
        cap: C ≥ 1.
        delta: δ > 0 in nats, the mismatch above the floor that needs the whole correction.
        gamma: γ > 0, the growth of std(A·w̄) that is tolerated.
        beta: β ≥ 0, sensitivity to growth beyond it.
        floor: Mean |d| ≥ 0 in nats that is the engine's own and needs no correction.
        part: [N] int64, equal for tokens that share an α; one α for all when None.
    """
    d, a = log_ratio.detach().double(), advantage.detach().double()
    w = truncated(d, cap=cap)
    if not len(d):
        one, zero = d.new_ones(1), d.new_zeros(1)
        return Adaptive(weight=w, alpha=zero, reliability=one, necessity=zero, inflation=zero)
    parts = _Parts.of(torch.zeros_like(d, dtype=torch.int64) if part is None else part)
    cv_squared = parts.variance(w) / parts.mean(w).square()
    reliability = (1 + cv_squared).rsqrt()
    necessity = ((parts.mean(d.abs()) - floor).clamp(min=0.0) / delta).clamp(max=1.0)
    inflation = ((_noise_growth(parts, a, w) - gamma) / gamma).clamp(min=0.0)
    alpha = (reliability - beta * inflation).clamp(0.0, 1.0) * necessity
    return Adaptive(
        weight=1 + alpha[parts.index] * (w - 1),
        alpha=alpha,
        reliability=reliability,
        necessity=necessity,
        inflation=inflation,
    )


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """Means over the tokens of each part."""

    index: Tensor
    """[N] int64 in [0, K)."""
    size: Tensor
    """[K] float64 > 0."""

    @classmethod
    def of(cls, part: Tensor) -> _Parts:
        _, index = distinct(part)
        return cls(index=index, size=torch.bincount(index).double())

    def mean(self, values: Tensor) -> Tensor:
        return torch.zeros_like(self.size).index_add(0, self.index, values) / self.size

    def variance(self, values: Tensor) -> Tensor:
        return self.mean((values - self.mean(values)[self.index]).square())

    def all_equal(self, values: Tensor) -> Tensor:
        low, high = (
            torch.zeros_like(self.size).scatter_reduce(
                0, self.index, values, how, include_self=False
            )
            for how in ("amin", "amax")
        )
        return low == high


def _noise_growth(parts: _Parts, a: Tensor, w: Tensor) -> Tensor:
    """[K] Δσ."""
    spread = parts.variance(a * w).sqrt() / (parts.variance(a).sqrt() + _EPSILON)
    second = parts.mean(a.square())
    flat = (parts.mean((a * w).square()) / torch.where(second > 0, second, 1.0)).sqrt()
    # Equality, not std > 0: the std of equal numbers may round to something above 0.
    return torch.where(parts.all_equal(a), flat, spread)


def _weights(
    part_of: Callable[[PolicyGap], Tensor | None],
) -> Callable[[Ratios, Constants], Weights]:
    """1 + α(min(ρ, cap) − 1) over the kept tokens, with an α per part."""

    def weigh(ratios: Ratios, constants: Constants) -> Weights:
        keep, part = ratios.keep, part_of(ratios.gap)
        mixed = adaptive(
            ratios.log_ratio[keep],
            ratios.advantage[keep],
            part=None if part is None else part[keep],
            **constants,
        )
        weight = torch.ones_like(ratios.log_ratio)
        weight[keep] = mixed.weight.to(weight.dtype)
        if ratios.gate is not None:
            capped = truncated(ratios.log_ratio, cap=constants["cap"])
            weight = (1 + ratios.gate * (capped - 1)).to(weight.dtype)
        return Weights(
            weight=weight,
            gate=mixed.alpha[0] if part is None else None,
            factors={
                "adaptive/alpha": mixed.alpha,
                "adaptive/reliability": mixed.reliability,
                "adaptive/necessity": mixed.necessity,
                "adaptive/inflation": mixed.inflation,
            },
        )

    return weigh


def _preset(
    name: str,
    scope: Scope,
    part_of: Callable[[PolicyGap], Tensor | None],
    *,
    over: str,
    use: str,
    source: str,
) -> Preset:
    return Preset(
        name=name,
        level=TOKEN,
        scope=scope,
        weight=_weights(part_of),
        bounds=lambda constants: (0.0, max(1.0, constants["cap"])),
        constants={
            "cap": Constant(default=5.0, low=1.0, meaning="C, largest ratio", usual="5"),
            "delta": Constant(
                default=0.02,
                open_low=True,
                meaning="δ, mean |d| above the floor in nats that needs all of it",
                usual=".02",
            ),
            "gamma": Constant(
                default=1.2, open_low=True, meaning="γ, tolerated growth of std(A·w)", usual="1.2"
            ),
            "beta": Constant(default=1.0, meaning="β, sensitivity to growth beyond γ"),
            "floor": Constant(
                default=0.0,
                meaning="mean |d| of freshly sampled tokens in nats, which is the engine's own",
                usual="0 (the paper); bfloat16 engines .03–.04",
            ),
        },
        upper="cap",
        gated=name == "ais",
        formula="w = 1 + α(min(ρ, cap) − 1), α = clip(α_ess − beta·α_var, 0, 1)·α_mis " + over,
        meaning="Adaptive importance sampling: as much correction as the data support.",
        use=use,
        source=source,
    )


_PAPER = "AIS for quantised rollouts, Eq. 10-18"

PRESETS = (
    _preset(
        "ais",
        "batch",
        lambda gap: None,
        over="over the step batch",
        use="Quantised engines, whose mismatch is real and whose weights degenerate from time to "
        "time. Set `floor` to the engine's own mismatch, or the necessity gate is always open.",
        source=_PAPER,
    ),
    _preset(
        "ais-lag",
        "batch",
        lambda gap: gap.lag,
        over="over the tokens of equal lag",
        use="Asynchronous runs: fresh tokens are not judged by stale ones.",
        source=f"{_PAPER}; α per lag is trueup's",
    ),
    _preset(
        "ais-episode",
        "sequence",
        lambda gap: gap.episode,
        over="over the episode",
        use="One bad episode is corrected less without loosening the others; needs no second pass.",
        source=f"{_PAPER}; α per episode is trueup's",
    ),
)
