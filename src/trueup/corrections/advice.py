"""Which correction a gap calls for: facts, a rule on them, and the reason in words and numbers.

The rule, first match:

1. `none` — mean |d| is within `NEGLIGIBLE`, and the raw token ratios keep `HEALTHY` of the sample.
2. `mis` — few tokens (at most `RARE`) are outside the band of `mis`, they hold `DOMINANT` of E[d²],
   and the others agree within `NEGLIGIBLE`: damage to single tokens. Drift moves all of them.
3. `tis` — otherwise. In problems whose gradient is known its squared error is the least at every
   distance of the policies; where the raw token ratios keep less than `WEAK` of the sample, the
   distance itself is what to repair.

What looks like a bug is named apart, whatever the preset: no weight repairs it. A mean ratio above
1 is one. A mean ratio *below* 1 need not be: tokens that the target has come to prefer and the
behaviour hardly sampled are not in the sample, and neither is their part of the standard error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trueup.corrections.compose import correct
from trueup.corrections.whatif import Row
from trueup.diagnostics.health import Verdict, health
from trueup.diagnostics.numerics import quantile, safe_mean
from trueup.gap import PolicyGap, exp_clamped

NEGLIGIBLE = 0.04
"""Mean |d| in nats that the arithmetic of a bfloat16 engine alone brings about."""
HEALTHY = 0.9
"""ESS ratio of the raw token ratios from which their spread is no concern."""
WEAK = 0.3
"""ESS ratio below which a few tokens carry a step."""
BAND = (0.5, 5.0)
"""Ratios that `mis` keeps by default."""
RARE = 0.1
"""Largest share of tokens that is damage and not drift."""
DOMINANT = 0.9
"""Share of E[d²] that makes rare tokens the gap."""

MATERIAL = 0.01
"""Least distance of the mean ratio from 1 that is told. Noise of σ nats in a recorded log-prob
moves it by σ²/2, which many tokens make significant and nothing makes matter."""

_BUGS = ("calibration", "behaviour_varies", "missing_logp")
"""Verdicts that no correction can mend."""
_UNEVEN = 0.5
"""A kept share below this part of its counterpart is worth a caution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the step batches are, before any correction."""

    steps: int
    episodes: int
    tokens: int
    """Action tokens with a known behaviour log-prob."""
    missing: int
    """Action tokens without one."""
    abs_mean: float
    """Mean |d| in nats; `abs_median` and `abs_max` likewise."""
    abs_median: float
    abs_max: float
    ess_tokens: float
    """Of the raw token ratios, mean over the step batches."""
    ess_episodes: float
    """Of the raw products over an episode."""
    outside: float
    """Share of the tokens outside `BAND`."""
    outside_moment: float
    """Their share of E[d²]."""
    inside_abs_mean: float
    """Mean |d| of the others."""
    floor: float | None
    """Mean |log π_v − log μ| of the scored tokens: the engine's part; None if none is scored."""
    max_lag: int
    bugs: tuple[Verdict, ...]
    """Failed verdicts that no correction mends, the worst step batch of each."""
    unseen: Verdict | None
    """The worst step batch whose mean ratio is too far below 1; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """What to do."""

    preset: str
    reason: str
    fixes: tuple[str, ...]
    """What to repair first."""
    cautions: tuple[str, ...]
    """What some of the compared presets would do to lengths and rewards."""


def facts(batches: Sequence[PolicyGap]) -> Facts:
    """Measure step batches, at least one of them with a token whose log μ is known."""
    decided = [
        correct(gap, preset="none", zero_variance="keep").metrics
        for gap in batches
        if bool(gap.valid.any())
    ]
    failed: dict[tuple[str, bool], Verdict] = {}
    for metrics in decided:
        off = abs(metrics["weight/raw"].mean - 1)
        for verdict in health(metrics, corrects=False):
            if verdict.name == "calibration" and off < MATERIAL:
                continue
            kind = verdict.name, verdict.value < 0
            if not verdict.ok and (
                kind not in failed or abs(verdict.value) > abs(failed[kind].value)
            ):
                failed[kind] = verdict
    d = torch.cat([gap.log_ratio[gap.valid] for gap in batches]).double().cpu()
    size, square = d.abs(), d.square()
    ratio = exp_clamped(d)
    good = (ratio >= BAND[0]) & (ratio <= BAND[1])
    ordered = size.sort().values
    lags = torch.cat([gap.lag for gap in batches])
    return Facts(
        steps=len(batches),
        episodes=sum(gap.num_episodes for gap in batches),
        tokens=len(d),
        missing=sum(gap.num_tokens for gap in batches) - len(d),
        abs_mean=float(safe_mean(size)),
        abs_median=float(quantile(ordered, 0.5)),
        abs_max=float(quantile(ordered, 1.0)),
        ess_tokens=_mean([m["ess/raw_tokens"].mean for m in decided]),
        ess_episodes=_mean([m["ess/raw_episodes"].mean for m in decided]),
        outside=1 - float(safe_mean(good)),
        outside_moment=float(square[~good].sum() / square.sum().clamp(min=1e-300)),
        inside_abs_mean=float(safe_mean(size[good])),
        floor=_floor(batches),
        max_lag=int(lags.max()),
        bugs=tuple(v for (name, below), v in failed.items() if name in _BUGS and not below),
        unseen=failed.get(("calibration", True)),
    )


def recommend(found: Facts, rows: Sequence[Row] = ()) -> Recommendation:
    """The preset that the module's rule picks, and what `rows` warn of."""
    preset, reason = _choice(found)
    return Recommendation(
        preset=preset,
        reason=reason,
        fixes=tuple(_fixes(found)),
        cautions=tuple(_cautions(found, rows)),
    )


def _choice(found: Facts) -> tuple[str, str]:
    gap = f"mean |d| is {found.abs_mean:.3g} nats"
    ess = f"the raw token ratios keep {found.ess_tokens:.0%} of the sample"
    if found.abs_mean <= NEGLIGIBLE and found.ess_tokens >= HEALTHY:
        return "none", (
            f"{gap}, within the {NEGLIGIBLE:g} of a bfloat16 engine's arithmetic, and {ess}: "
            "there is nothing to correct"
        )
    if (
        found.outside <= RARE
        and found.outside_moment >= DOMINANT
        and found.inside_abs_mean <= NEGLIGIBLE
    ):
        return "mis", (
            f"{found.outside:.2%} of the tokens are outside the band and hold "
            f"{found.outside_moment:.0%} of E[d²], while the others agree within "
            f"{found.inside_abs_mean:.3g} nats: damaged tokens, not drift; reject them"
        )
    return "tis", (
        f"{gap} and {ess}, which is more than a bfloat16 engine's arithmetic "
        f"({NEGLIGIBLE:g}, {HEALTHY:.0%}) and not the damage of a few tokens: capped ratios remove "
        "most of the bias at little variance"
    )


def _fixes(found: Facts) -> list[str]:
    fixes = [f"{v.message} ({v.value:.3g}; must be {v.rule})" for v in found.bugs]
    if found.ess_tokens < WEAK:
        fixes.append(
            f"the raw token ratios keep {found.ess_tokens:.0%} of the sample, less than "
            f"{WEAK:.0%}: a few tokens carry a step; lower the staleness or the learning rate, or "
            "mend the engine"
        )
    return fixes


def _cautions(found: Facts, rows: Sequence[Row]) -> list[str]:
    cautions = []
    if found.unseen is not None:
        cautions.append(
            f"the mean ratio of a step batch is below 1 (z = {found.unseen.value:.3g}): the target "
            "prefers tokens that were hardly sampled, which no weight brings back, or log-probs "
            "are wrong"
        )
    for kept, of, told in (
        (_longest, _shortest, "the longest and of the shortest episodes"),
        (_rewarded, _unrewarded, "rewarded and of other episodes"),
    ):
        uneven = [
            f"{row.preset} {part:.0%} and {whole:.0%}"
            for row in rows
            if (part := kept(row)) is not None
            and (whole := of(row)) is not None
            and part < _UNEVEN * whole
        ]
        if uneven:
            cautions.append(f"kept of the tokens of {told}: {', '.join(uneven)}")
    return cautions


def _longest(row: Row) -> float | None:
    return next((x for x in reversed(row.kept.by_length) if x is not None), None)


def _shortest(row: Row) -> float | None:
    return next((x for x in row.kept.by_length if x is not None), None)


def _rewarded(row: Row) -> float | None:
    return row.kept.rewarded


def _unrewarded(row: Row) -> float | None:
    return row.kept.unrewarded


def _floor(batches: Sequence[PolicyGap]) -> float | None:
    parts = [
        (gap.logp_version - gap.logp_behaviour)[gap.valid & torch.isfinite(gap.logp_version)]
        for gap in batches
        if gap.logp_version is not None
    ]
    engine = torch.cat(parts) if parts else torch.zeros(0)
    return float(safe_mean(engine.abs())) if len(engine) else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)
