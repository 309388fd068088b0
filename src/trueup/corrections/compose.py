"""From a gap to a correction, in the one order in which it is right.

    ratio-only filters → group baselines without the rejected → advantages
        → signed filters and adaptive mixing → weights → denominator

An episode leaves its group's baseline when it has no action token, when all its behaviour log-probs
are missing (the engine produced garbage), or when a filter at a level of whole episodes rejects it.
A token-level filter takes no reward with it: the advantage of the token's episode is unchanged,
even if none of its tokens is left.

Shapes: N action tokens, E episodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from trueup.corrections.base import Correction
from trueup.corrections.preset import Preset, Ratios
from trueup.corrections.statistics import Outcome, correction_metrics
from trueup.corrections.table import find
from trueup.gap import PolicyGap
from trueup.losses.advantages import AdvantageKind, group_advantages
from trueup.losses.reduce import DenominatorKind
from trueup.losses.reduce import denominator as loss_denominator

ZeroVarianceKind = Literal["drop", "keep", "refill"]
"""Groups without contrast leave the step batch, Z included (`drop`, and `refill` for those that
were not replaced), or stay in it with advantage 0 (`keep`)."""


def correct(
    gap: PolicyGap,
    *,
    preset: str,
    params: Mapping[str, float] | None = None,
    advantage: AdvantageKind = "group_std",
    zero_variance: ZeroVarianceKind = "drop",
    denominator: DenominatorKind = "all",
    max_lag: int | None = None,
) -> Correction:
    """Decide advantages, weights, keep flags and Z of a step batch.

    Args:
        gap: The step batch.
        preset: Name in `table.PRESETS`.
        params: Overrides of the preset's constants.
        advantage: Baseline and scale of the group-relative advantage.
        zero_variance: What happens to groups without contrast.
        denominator: Z counts all action tokens of the step batch, whatever was rejected, or only
            those in the loss.
        max_lag: Tokens with a larger lag leave the loss; their episodes stay in the baseline.

    Raises:
        ConfigError: The preset or a constant is unknown, or a constant is out of range.
    """
    return apply(
        gap,
        find(preset),
        params=params or {},
        advantage=advantage,
        zero_variance=zero_variance,
        denominator=denominator,
        max_lag=max_lag,
    )


@torch.no_grad()
def apply(
    gap: PolicyGap,
    preset: Preset,
    *,
    params: Mapping[str, float],
    advantage: AdvantageKind,
    zero_variance: ZeroVarianceKind,
    denominator: DenominatorKind,
    max_lag: int | None,
) -> Correction:
    """`correct` with a preset that need not be in the table."""
    constants = preset.resolve(params)
    valid, log_ratio = gap.valid, preset.level.log_ratio(gap)
    ratios = Ratios(gap=gap, log_ratio=log_ratio, keep=valid, advantage=torch.zeros_like(log_ratio))
    if preset.ratio_filter is not None:
        ratios = replace(ratios, keep=valid & preset.ratio_filter(ratios, constants))

    counted = _any_token(gap, ratios.keep if preset.level.whole_episode else valid)
    grouped = group_advantages(gap.reward, gap.group, counted=counted, kind=advantage)
    stays = grouped.contrast if zero_variance != "keep" else torch.ones_like(grouped.contrast)
    over_bound = torch.zeros_like(valid) if max_lag is None else gap.lag > max_lag
    keep = ratios.keep & stays[gap.episode] & ~over_bound

    ratios = replace(ratios, keep=keep, advantage=grouped.value[gap.episode])
    if preset.signed_filter is not None:
        ratios = replace(ratios, keep=keep & preset.signed_filter(ratios, constants))
    weights = preset.weight(ratios, constants)
    outcome = Outcome(
        log_ratio=log_ratio,
        weight=torch.where(ratios.keep, weights.weight, 0.0),
        keep=ratios.keep,
        present=stays[gap.episode],
        counted=counted,
        grouped=grouped,
        over_bound=over_bound,
        cap=constants.get(preset.upper),
        factors=weights.factors,
    )
    metrics = correction_metrics(gap, outcome)
    tokens = metrics.get("kept/tokens")
    return Correction(
        advantages=ratios.advantage,
        weight=outcome.weight,
        keep=outcome.keep,
        denominator=loss_denominator(
            denominator,
            num_all=tokens.count if tokens else 0.0,
            num_kept=tokens.sum if tokens else 0.0,
        ),
        metrics=metrics,
    )


def _any_token(gap: PolicyGap, flags: Tensor) -> Tensor:
    """[E] bool: the episode has a flagged token."""
    hits = torch.zeros_like(gap.group).index_add(0, gap.episode, flags.long())
    return hits > 0
