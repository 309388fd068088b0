"""Importance weights: as they are, or bounded.

Truncation [TIS, Yao et al. 2025] bounds the second moment of a weighted term by C² times that of
the unweighted one and leaves the bias of what it cuts off. Small weights are not raised, except by
`clip`. One function at several levels is several methods.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trueup.corrections.levels import PREFIX_MIN, PRODUCT, TOKEN, TURN_PRODUCT
from trueup.corrections.preset import Constant, Constants, Preset, Ratios, Weights
from trueup.gap import LOG_RATIO_LIMIT, exp_clamped

LARGEST_RATIO = math.exp(LOG_RATIO_LIMIT)
"""Largest weight that is ever emitted."""


def importance(log_ratio: Tensor) -> Tensor:
    """ρ = e^d, d clamped to ±20."""
    return exp_clamped(log_ratio)


def truncated(log_ratio: Tensor, *, cap: float) -> Tensor:
    """min(ρ, C)."""
    return exp_clamped(log_ratio).clamp(max=cap)


def uncorrected_weights(ratios: Ratios, constants: Constants) -> Weights:
    """1 for every token."""
    return Weights(weight=torch.ones_like(ratios.log_ratio))


def importance_weights(ratios: Ratios, constants: Constants) -> Weights:
    """ρ; a filter bounds it."""
    return Weights(weight=importance(ratios.log_ratio))


def truncated_weights(ratios: Ratios, constants: Constants) -> Weights:
    """min(ρ, cap)."""
    return Weights(weight=truncated(ratios.log_ratio, cap=constants["cap"]))


def clipped_weights(ratios: Ratios, constants: Constants) -> Weights:
    """clip(ρ, low, high)."""
    ratio = importance(ratios.log_ratio)
    return Weights(weight=ratio.clamp(constants["low"], constants["high"]))


def ones(constants: Constants) -> tuple[float, float]:
    """Bounds of a weight that is always 1."""
    return 1.0, 1.0


def unbounded(constants: Constants) -> tuple[float, float]:
    """Bounds of ρ itself."""
    return 0.0, LARGEST_RATIO


def up_to_cap(constants: Constants) -> tuple[float, float]:
    """Bounds of min(ρ, cap)."""
    return 0.0, constants["cap"]


def band(constants: Constants) -> tuple[float, float]:
    """Bounds of a weight inside [low, high]."""
    return constants["low"], constants["high"]


def _cap(usual: str) -> dict[str, Constant]:
    return {
        "cap": Constant(default=2.0, open_low=True, meaning="C, largest weight", usual=usual),
    }


PRESETS = (
    Preset(
        name="none",
        level=TOKEN,
        scope="token",
        weight=uncorrected_weights,
        bounds=ones,
        formula="w = 1",
        meaning="No correction: the gap stays in the gradient as bias.",
        use="A synchronous run on an exact engine, or the reference of a comparison.",
        source="baseline",
    ),
    Preset(
        name="is",
        level=TOKEN,
        scope="token",
        weight=importance_weights,
        bounds=unbounded,
        formula="w = ρ",
        meaning="Importance sampling per token: unbiased for the token, variance without bound.",
        use="Small gaps, or to see what a cap costs. Never with long tails.",
        source="textbook",
    ),
    Preset(
        name="seq-is",
        level=PRODUCT,
        scope="sequence",
        weight=importance_weights,
        bounds=unbounded,
        formula="w = ρ_seq = exp(Σ_t d_t)",
        meaning="Importance sampling of whole episodes: unbiased, variance exponential in length.",
        use="Episodes of a few tokens, or as the unbiased reference.",
        source="textbook",
    ),
    Preset(
        name="tis",
        level=TOKEN,
        scope="token",
        weight=truncated_weights,
        bounds=up_to_cap,
        constants=_cap("2 (FlashRL also 8; AIS's baselines 2, 5, 10; TRL 3)"),
        upper="cap",
        formula="w = min(ρ, cap)",
        meaning="Truncated importance sampling: bounded variance, biased where ρ > cap.",
        use="The default: small to moderate gaps with outliers.",
        source="Yao et al. 2025",
    ),
    Preset(
        name="clip",
        level=TOKEN,
        scope="token",
        weight=clipped_weights,
        bounds=band,
        constants={
            "low": Constant(default=0.5, high=1.0, meaning="least weight"),
            "high": Constant(default=2.0, low=1.0, meaning="largest weight"),
        },
        upper="high",
        formula="w = clip(ρ, low, high)",
        meaning="Bounded on both sides: a token that the target disowns still counts `low`.",
        use="When no token may be silenced; it is biased on both sides.",
        source="slime",
    ),
    Preset(
        name="seq-tis",
        level=PRODUCT,
        scope="sequence",
        weight=truncated_weights,
        bounds=up_to_cap,
        constants=_cap("2–10"),
        upper="cap",
        formula="w = min(ρ_seq, cap), ρ_seq = exp(Σ_t d_t)",
        meaning="Truncated importance sampling of whole episodes.",
        use="Short episodes, or a large lag with little noise; long ones all end at 0 or the cap.",
        source="verl; Li et al. 2025",
    ),
    Preset(
        name="turn-tis",
        level=TURN_PRODUCT,
        scope="sequence",
        weight=truncated_weights,
        bounds=up_to_cap,
        constants=_cap("2"),
        upper="cap",
        formula="w = min(ρ_turn, cap), ρ_turn = exp(Σ_t d_t over the turn)",
        meaning="Truncated importance sampling of one turn of an episode, its action.",
        use="Agents with many short turns: their products stay near 1, the episode's does not.",
        source="trueup: TIS at the level of turns",
    ),
    Preset(
        name="minpro",
        level=PREFIX_MIN,
        scope="sequence",
        weight=truncated_weights,
        bounds=up_to_cap,
        constants=_cap("2"),
        upper="cap",
        moving=True,
        formula="w_t = min(exp(min over s ≤ t of Σ_{u ≤ s} d_u), cap)",
        meaning="The least ratio of any prefix so far: a token counts no more than what led to it.",
        use="Long episodes whose early tokens have become unlikely. The source takes the least "
        "single ratio of the prefix instead of the least product.",
        source="MinPRO, arXiv 2601.22718",
    ),
)
