"""Rejection by how far the policies are apart, whatever the direction.

k2 = ½d² and k3 = ρ − 1 − d are ≥ 0 and estimate KL(μ‖π) of a token [Schulman 2020]: errors of
opposite sign do not cancel, as they do in Σ d. Their sum, mean or maximum over an episode rejects
it whole. KPop compares the two policies on {this token, any other} in both directions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trueup.corrections.levels import GEOMETRIC, LARGEST, PRODUCT, TOKEN, Level
from trueup.corrections.preset import Constant, Constants, Filter, Preset, Ratios
from trueup.corrections.truncated import (
    importance_weights,
    ones,
    unbounded,
    uncorrected_weights,
)
from trueup.gap import exp_clamped

_LEAST_PROBABILITY = 1e-6
"""Probabilities are kept this far from 0 and 1 [prime-rl]: a token that both policies are sure of
would be 0·log(0/0)."""


def k2(log_ratio: Tensor) -> Tensor:
    """½d²."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """ρ − 1 − d."""
    return exp_clamped(log_ratio) - 1 - log_ratio


def binary_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL between two policies on the events "this token" and "any other", float64.

    Args:
        p: [N] log-prob of the token under the first.
        q: [N] log-prob under the second.
    """
    a, b = (x.double().exp().clamp(_LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY) for x in (p, q))
    return a * (a.log() - b.log()) + (1 - a) * ((-a).log1p() - (-b).log1p())


def _both_directions_within(ratios: Ratios, constants: Constants) -> Tensor:
    target, behaviour = ratios.gap.logp_target, ratios.gap.logp_behaviour
    worst = torch.maximum(binary_kl(target, behaviour), binary_kl(behaviour, target))
    return worst <= constants["limit"]


def _limit(
    estimate: Callable[[Tensor], Tensor], level: Level
) -> Callable[[Ratios, Constants], Tensor]:
    def keep(ratios: Ratios, constants: Constants) -> Tensor:
        return level.of(ratios.gap, estimate(ratios.gap.log_ratio)) <= constants["limit"]

    return keep


_LEVELS = {
    "token": (TOKEN, "", "token"),
    "mean": (GEOMETRIC, "mean_t ", "episode"),
    "sum": (PRODUCT, "Σ_t ", "episode"),
    "max": (LARGEST, "max_t ", "episode"),
}


def _kn(
    name: str,
    estimate: Callable[[Tensor], Tensor],
    over: str,
    default: float,
    *,
    usual: str = "",
    source: str,
) -> Preset:
    level, operator, what = _LEVELS[over]
    where = "a token" if what == "token" else f"the {over} over an episode"
    return Preset(
        name=f"{name}-{over}",
        level=TOKEN,
        scope="token" if what == "token" else "group",
        weight=uncorrected_weights,
        bounds=ones,
        constants={
            "limit": Constant(
                default=default, meaning=f"largest {operator}{name} kept, in nats", usual=usual
            )
        },
        filter=Filter(level=level, keep=_limit(estimate, level)),
        formula=f"w = 1 if {operator}{name} <= limit, else the {what} is rejected; "
        + ("k2 = ½d²" if estimate is k2 else "k3 = ρ − 1 − d"),
        meaning=f"Filter on {where} of an estimate of KL(μ‖π) that cannot cancel.",
        use={
            "token": "Beside a weight at another level.",
            "mean": "Beside `tis`: what is far off on the whole goes, whatever its length.",
            "sum": "Short episodes only: a sum grows with length.",
            "max": "When one broken token means a broken episode.",
        }[over],
        source=source,
    )


_OURS = "; no published constant, the default is ours"

PRESETS = (
    Preset(
        name="kpop",
        level=TOKEN,
        scope="token",
        weight=importance_weights,
        bounds=unbounded,
        constants={
            "limit": Constant(default=0.1, meaning="φ, largest binary KL kept, in nats", usual=".1")
        },
        filter=Filter(level=TOKEN, keep=_both_directions_within),
        moving=True,
        formula="w = ρ if max(D(π‖μ), D(μ‖π)) <= limit, else the token is rejected; "
        "D(p‖q) = p·log(p/q) + (1−p)·log((1−p)/(1−q))",
        meaning="Binary KL in both directions: wide in ratio for rare tokens, tight for sure ones.",
        use="Where `mis` rejects too many rare tokens.",
        source="KPop, Ring team 2026; prime-rl #3283; verl #6800",
    ),
    _kn("k2", k2, "token", 2.0, usual="1.5–3", source="verl token_k2"),
    _kn("k2", k2, "mean", 0.01, source=f"verl seq_mean_k2{_OURS}"),
    _kn("k2", k2, "sum", 2.0, source=f"verl seq_sum_k2{_OURS}"),
    _kn("k2", k2, "max", 2.0, usual="1.5–3", source="verl seq_max_k2; slime"),
    _kn("k3", k3, "token", 2.0, source=f"verl token_k3{_OURS}"),
    _kn("k3", k3, "mean", 0.01, usual=".01", source="verl seq_mean_k3"),
    _kn("k3", k3, "sum", 2.0, source=f"verl seq_sum_k3{_OURS}"),
    _kn("k3", k3, "max", 2.0, source=f"verl seq_max_k3{_OURS}"),
    Preset(
        name="trm",
        level=TOKEN,
        scope="group",
        weight=importance_weights,
        bounds=unbounded,
        constants={
            "limit": Constant(
                default=0.5, meaning="δ, largest k3 of any token of a kept episode, in nats"
            )
        },
        filter=Filter(level=LARGEST, keep=_limit(k3, LARGEST)),
        formula="w = ρ, but an episode with max_t k3 > limit is rejected",
        meaning="Trust region masking: the bound on the surrogate's error needs every token.",
        use="Long episodes whose worst token decides. The default of δ is ours.",
        source="arXiv 2512.23075",
    ),
)
