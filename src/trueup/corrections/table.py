"""The table of correction presets.

To add one: the functions of a new filter or weight in a file of their own, and an entry here. It is
then accepted by `correct`, explained by `explain`, and run by the contract suite.
"""

from __future__ import annotations

from collections.abc import Mapping

from trueup.corrections.adaptive import adaptive_weights
from trueup.corrections.levels import TOKEN
from trueup.corrections.masked import band_filter
from trueup.corrections.preset import Constant, Preset, Scope, unknown
from trueup.corrections.truncated import (
    importance_weights,
    truncated_weights,
    uncorrected_weights,
)

_PRESETS = (
    Preset(
        name="none",
        level=TOKEN,
        scope="token",
        weight=uncorrected_weights,
        formula="w = 1",
        meaning="No correction: the gap stays in the gradient as bias.",
        source="baseline",
    ),
    Preset(
        name="tis",
        level=TOKEN,
        scope="token",
        weight=truncated_weights,
        constants={"cap": Constant(default=2.0, open_low=True, meaning="C, largest weight")},
        upper="cap",
        formula="w = min(ρ, cap)",
        meaning="Truncated importance sampling: bounded variance, biased where ρ > cap.",
        source="Yao et al. 2025",
    ),
    Preset(
        name="mis",
        level=TOKEN,
        scope="token",
        weight=importance_weights,
        constants={
            "low": Constant(default=0.5, meaning="least ratio kept, inclusive"),
            "high": Constant(default=5.0, open_low=True, meaning="largest ratio kept, inclusive"),
        },
        ascending=("low", "high"),
        upper="high",
        ratio_filter=band_filter,
        formula="w = ρ if low <= ρ <= high, else the token is rejected",
        meaning="Masked importance sampling (IcePop): what disagrees too much is noise.",
        source="Ring-1T report 2025",
    ),
    Preset(
        name="ais",
        level=TOKEN,
        scope="batch",
        weight=adaptive_weights,
        constants={
            "cap": Constant(default=5.0, low=1.0, meaning="C, largest ratio"),
            "delta": Constant(
                default=0.02, open_low=True, meaning="δ, mean |d| in nats that needs all of it"
            ),
            "gamma": Constant(
                default=1.2, open_low=True, meaning="γ, tolerated growth of std(A·w)"
            ),
            "beta": Constant(default=1.0, meaning="β, sensitivity to growth beyond γ"),
        },
        upper="cap",
        formula="w = 1 + α(min(ρ, cap) − 1), α = clip(α_ess − beta·α_var, 0, 1)·α_mis",
        meaning="Adaptive importance sampling: as much correction as the step batch supports.",
        source="AIS for quantised rollouts, Eq. 10-18",
    ),
)

PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _PRESETS}
"""Every preset by name."""

_FUSED = (
    "1 forward per token for log π_old; it may be the update's own with one optimiser step per "
    "step batch and denominator 'all'"
)
_SCORED_FIRST = "1 forward per token for log π_old of the whole step batch, before the update's own"
_PRICE: Mapping[Scope, str] = {
    "token": _FUSED,
    "sequence": _FUSED,
    "group": _SCORED_FIRST,
    "batch": _SCORED_FIRST,
}


def find(name: str) -> Preset:
    """The preset of that name.

    Raises:
        ConfigError: There is none; names the nearest.
    """
    if name not in PRESETS:
        raise unknown("correction.preset", name, list(PRESETS))
    return PRESETS[name]


def explain(name: str) -> str:
    """What a preset computes, why, where it is from, and what it costs.

    Raises:
        ConfigError: There is no such preset.
    """
    preset = find(name)
    lines = [
        f"{preset.name}: {preset.formula}",
        preset.meaning,
        f"level {preset.level.name}, scope {preset.scope}; source: {preset.source}",
    ]
    lines += [f"{key} = {c.default:g}: {c.meaning}" for key, c in preset.constants.items()]
    lines.append(f"price: {_PRICE[preset.scope]}")
    return "\n".join(lines)
