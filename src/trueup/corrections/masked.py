"""Rejection of ratios outside a band [MIS; IcePop of the Ring-1T report].

Bounds are in ratio space, inclusive, and may be asymmetric: [.5, 5] keeps ρ = 4 and rejects ρ = .3.
They hold 1, so that nothing is rejected where the policies agree.

A band at the level of an episode rejects it whole; k1 = −d, so that a bound on k1 is a bound on the
ratio, in the same direction for every preset here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueup.corrections.levels import (
    GEOMETRIC,
    LARGEST,
    LEAST,
    PRODUCT,
    TOKEN,
    TURN_GEOMETRIC,
    Level,
)
from trueup.corrections.preset import Constant, Constants, Filter, Preset, Ratios, Scope
from trueup.corrections.truncated import band, importance_weights, ones, uncorrected_weights
from trueup.gap import exp_clamped

if TYPE_CHECKING:
    from torch import Tensor


def inside(log_ratio: Tensor, *, low: float, high: float) -> Tensor:
    """[N] bool: low ≤ ρ ≤ high.

    Compared as ratios in the precision of the log-ratios, so that the rounded logarithm of a bound
    is inside.
    """
    ratio = exp_clamped(log_ratio)
    return (ratio >= low) & (ratio <= high)


def band_filter(ratios: Ratios, constants: Constants) -> Tensor:
    """Keep what has its ratio inside [low, high]."""
    return inside(ratios.log_ratio, low=constants["low"], high=constants["high"])


def _all_inside(ratios: Ratios, constants: Constants) -> Tensor:
    d = ratios.gap.log_ratio
    outside = ~inside(d, low=constants["low"], high=constants["high"])
    return LARGEST.of(ratios.gap, outside.to(d.dtype)) == 0


def _least_above(ratios: Ratios, constants: Constants) -> Tensor:
    return exp_clamped(ratios.log_ratio) >= constants["low"]


def _bounds(low: float, high: float, usual: str = "") -> dict[str, Constant]:
    return {
        "low": Constant(default=low, high=1.0, meaning="least ratio kept, inclusive", usual=usual),
        "high": Constant(default=high, low=1.0, meaning="largest ratio kept, inclusive"),
    }


def _band(
    name: str,
    level: Level,
    scope: Scope,
    limits: dict[str, Constant],
    *,
    weighted: bool = False,
    formula: str,
    meaning: str,
    use: str,
    source: str,
) -> Preset:
    """A band whose survivors count fully, or are weighted by the same ratio."""
    return Preset(
        name=name,
        level=level,
        scope=scope,
        weight=importance_weights if weighted else uncorrected_weights,
        bounds=band if weighted else ones,
        constants=limits,
        upper="high",
        filter=Filter(level=level, keep=band_filter),
        formula=formula,
        meaning=meaning,
        use=use,
        source=source,
    )


PRESETS = (
    _band(
        "mis",
        TOKEN,
        "token",
        _bounds(0.5, 5.0, ".5–5; AReaL, NeMo-RL .5–2"),
        weighted=True,
        formula="w = ρ if low <= ρ <= high, else the token is rejected",
        meaning="Masked importance sampling (IcePop): what disagrees too much is noise.",
        use="Outliers that are noise of the engine, not drift: then large ratios are real.",
        source="Ring-1T report 2025",
    ),
    _band(
        "seq-mis",
        PRODUCT,
        "group",
        _bounds(0.5, 2.0, "verl .5–2; TRL at most 3"),
        weighted=True,
        formula="w = ρ_seq if low <= ρ_seq <= high, else the episode is rejected",
        meaning="Masked importance sampling of whole episodes.",
        use="Short episodes; it rejects the long ones: watch the kept share by length.",
        source="verl; TRL",
    ),
    _band(
        "geo",
        GEOMETRIC,
        "group",
        _bounds(0.999, 1.001, ".999–1.001; NeMo-RL 1.002"),
        formula="w = 1 if low <= ρ_geo <= high, else the episode is rejected; "
        "ρ_geo = exp(Σ_t d_t / T)",
        meaning="Geometric filter: the mean log-ratio of an episode, whatever its length.",
        use="As a filter beside `tis`, with bounds above the floor of the engine.",
        source="verl; NeMo-RL",
    ),
    _band(
        "turn-geo",
        TURN_GEOMETRIC,
        "sequence",
        _bounds(0.99, 1.01),
        formula="w = 1 if low <= ρ_geo of the turn <= high, else the turn is rejected",
        meaning="Geometric filter of one turn; the episode keeps its other turns and its reward.",
        use="Agents of which single turns were sampled by another version or context.",
        source="trueup: the geometric filter at the level of turns",
    ),
    _band(
        "k1-token",
        TOKEN,
        "token",
        _bounds(0.5, 2.0),
        formula="w = 1 if low <= ρ <= high, else the token is rejected",
        meaning="Band on the ratio of a token, without a weight.",
        use="As a filter beside a weight at another level.",
        source="verl token_k1",
    ),
    _band(
        "k1-sum",
        PRODUCT,
        "group",
        _bounds(0.5, 2.0),
        formula="w = 1 if low <= ρ_seq <= high, else the episode is rejected",
        meaning="Band on the product of an episode, without a weight.",
        use="Short episodes, beside a token weight.",
        source="verl seq_sum_k1",
    ),
    Preset(
        name="k1-max",
        level=TOKEN,
        scope="group",
        weight=uncorrected_weights,
        bounds=ones,
        constants=_bounds(0.2, 5.0),
        upper="high",
        filter=Filter(level=LARGEST, keep=_all_inside),
        formula="w = 1 if low <= ρ_t <= high for every token, else the episode is rejected",
        meaning="An episode with one token outside the band goes.",
        use="When one broken token means a broken episode.",
        source="trueup: k1 at the level of the worst token",
    ),
    Preset(
        name="veto",
        level=TOKEN,
        scope="group",
        weight=uncorrected_weights,
        bounds=ones,
        constants={
            "low": Constant(
                default=1e-4,
                open_low=True,
                high=1.0,
                meaning="c, ratio of a token below which its episode is rejected",
            )
        },
        filter=Filter(level=LEAST, keep=_least_above),
        formula="w = 1, but an episode with any ρ_t < low is rejected",
        meaning="Veto: a token that the target all but excludes makes the episode unusable.",
        use="Beside any weight, as insurance against broken engines.",
        source="slime",
    ),
)
