"""From a gap to a correction, in the one order in which it is right.

    ratio-only filters → group baselines without the rejected → advantages
        → signed filters and adaptive mixing → weights → denominator

Added filters come before the preset's own, in the order in which they are given.

An episode leaves its group's baseline when it has no action token, when all its behaviour log-probs
are missing (the engine produced garbage), or when a filter at a level of whole episodes rejects it.
A token-level filter takes no reward with it: the advantage of the token's episode is unchanged,
even if none of its tokens is left.

Shapes: N action tokens, E episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from trueup.corrections.base import Correction
from trueup.corrections.cause import Cause, part_of
from trueup.corrections.levels import Level
from trueup.corrections.method import Filters, Part, parts
from trueup.corrections.preset import Preset, Ratios
from trueup.corrections.statistics import Outcome, correction_metrics
from trueup.corrections.table import find
from trueup.diagnostics.metrics import Metric
from trueup.gap import PolicyGap
from trueup.losses.advantages import AdvantageKind, group_advantages, without_rejected
from trueup.losses.reduce import DenominatorKind
from trueup.losses.reduce import denominator as loss_denominator

NORMALIZE = "normalize"
"""Name of the gate of normalised weights, their mean."""

ZeroVarianceKind = Literal["drop", "keep", "refill"]
"""Groups without contrast leave the step batch, Z included (`drop`, and `refill` for those that
were not replaced), or stay in it with advantage 0 (`keep`)."""

Record = Callable[[PolicyGap, Outcome], Mapping[str, Metric]]
"""Makes the metrics of what was decided."""


def correct(
    gap: PolicyGap,
    *,
    preset: str,
    params: Mapping[str, float] | None = None,
    advantage: AdvantageKind = "group_std",
    zero_variance: ZeroVarianceKind = "drop",
    denominator: DenominatorKind = "all",
    max_lag: int | None = None,
    filters: Filters | None = None,
    on: Cause = "total",
    normalize: bool = False,
) -> Correction:
    """Decide advantages, weights, keep flags and Z of a step batch.

    Args:
        gap: The step batch.
        preset: Name in `table.PRESETS`, or an alias.
        params: Overrides of the preset's constants.
        advantage: Baseline and scale of the group-relative advantage.
        zero_variance: What happens to groups without contrast.
        denominator: Z counts all action tokens of the step batch, whatever was rejected, or only
            those in the loss.
        max_lag: Tokens with a larger lag leave the loss; their episodes stay in the baseline.
        filters: Presets whose filters come first, in order, with overrides of their constants.
        on: The part of the gap that is corrected.
        normalize: Divide the weights by their mean over the kept tokens.

    Raises:
        ConfigError: A preset or a constant is unknown, or a constant is out of range.
        DataError: The gap lacks what the method reads: turns, or log π_v of every token.
    """
    return apply(
        gap,
        find(preset),
        params=params or {},
        advantage=advantage,
        zero_variance=zero_variance,
        denominator=denominator,
        max_lag=max_lag,
        filters=filters,
        on=on,
        normalize=normalize,
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
    given: Tensor | None = None,
    filters: Filters | None = None,
    on: Cause = "total",
    normalize: bool = False,
    baseline: Tensor | None = None,
    record: Record | None = correction_metrics,
    gates: Mapping[str, float] | None = None,
) -> Correction:
    """`correct` with a preset that need not be in the table, or for another trainer's advantages.

    Args:
        gap: The step batch.
        preset: The method.
        params: Overrides of its constants.
        advantage: Baseline and scale; without effect on advantages that are `given`.
        zero_variance: What happens to groups without contrast.
        denominator: What Z counts.
        max_lag: Tokens with a larger lag leave the loss.
        given: [N] advantages that need no baseline; `gap.reward` then holds their episode means.
        filters: Presets whose filters come first.
        on: The part of the gap that is corrected.
        normalize: Divide the weights by their mean over the kept tokens.
        baseline: [E] bool, the episodes that the baselines know of, for a gap that holds too few of
            their tokens to say so itself.
        record: Makes the metrics; None for a caller who has metrics of its own.
        gates: What another step batch decided for `gated` presets, instead of this one.
    """
    chosen = parts(preset, params, filters or {})
    pair = part_of(gap, on)
    valid, nothing = pair.valid, pair.logp_target.new_zeros(1).expand(gap.num_tokens)
    at = cache(lambda level: level.log_ratio(pair))
    ratios = Ratios(gap=pair, log_ratio=at(preset.level), keep=valid, advantage=nothing)
    gating = _Gates(gates or {})
    screened = _screen(ratios, chosen, at, gating)
    counted = _any_token(gap, screened.whole) if baseline is None else baseline
    if given is None:
        grouped = group_advantages(gap.reward, gap.group, counted=counted, kind=advantage)
        per_token = gap.per_token(grouped.value)
    else:
        grouped = without_rejected(gap.reward, gap.group, counted=counted)
        per_token = given + gap.per_token(grouped.value - gap.reward)
    stays = grouped.contrast if zero_variance != "keep" else torch.ones_like(grouped.contrast)
    present = gap.per_token(stays)
    keep = screened.keep & present
    over_bound = torch.zeros_like(valid)
    if max_lag is not None:
        over_bound = gap.lag > max_lag
        keep = keep & ~over_bound
    ratios = replace(ratios, keep=keep, advantage=per_token)
    ratios = replace(ratios, keep=_screen(ratios, chosen, at, gating, signed=True).keep)
    at.cache_clear()  # what only filters read is not held while weights are made
    decided = replace(ratios, gate=gating.given(preset.name, nothing))
    weights = preset.weight(decided, chosen[-1].constants)
    weight = torch.where(ratios.keep, weights.weight.float(), 0.0)
    if weights.gate is not None:
        gating.apply(preset.name, weights.gate)
    if normalize:
        weight = (weight / gating.apply(NORMALIZE, _mean(weight, ratios.keep))).float()
    outcome = Outcome(
        log_ratio=ratios.log_ratio,
        advantage=ratios.advantage,
        weight=weight,
        repeated=preset.level.whole_episode,
        keep=ratios.keep,
        present=present,
        counted=counted,
        grouped=grouped,
        over_bound=over_bound,
        cap=chosen[-1].constants.get(preset.upper),
        factors=weights.factors,
    )
    num_all, num_kept = torch.stack(
        [outcome.present.count_nonzero(), outcome.keep.count_nonzero()]
    ).tolist()
    return Correction(
        advantages=ratios.advantage,
        weight=outcome.weight,
        keep=outcome.keep,
        counts=outcome.present if denominator == "all" else outcome.keep,
        denominator=loss_denominator(denominator, num_all=num_all, num_kept=num_kept),
        gates={name: float(value) for name, value in gating.own.items()},
        metrics={} if record is None else record(gap, outcome),
    )


@dataclass(frozen=True, kw_only=True)
class _Screened:
    keep: Tensor
    """[N] bool: no filter rejected the token."""
    whole: Tensor
    """[N] bool: no filter rejected its episode."""


class _Gates:
    """The numbers that a step batch decides, and those that take their place."""

    def __init__(self, given: Mapping[str, float]) -> None:
        self._given = given
        self.own: dict[str, Tensor] = {}

    def given(self, name: str, like: Tensor) -> Tensor | None:
        found = self._given.get(name)
        return None if found is None else like.new_tensor(found, dtype=torch.float64)

    def apply(self, name: str, own: Tensor) -> Tensor:
        """Note what is decided here, and say what is applied."""
        self.own[name] = own
        given = self.given(name, own)
        return own if given is None else given


def _screen(
    ratios: Ratios,
    chosen: Sequence[Part],
    at: Callable[[Level], Tensor],
    gating: _Gates,
    *,
    signed: bool = False,
) -> _Screened:
    """Run the filters, the signed ones or the others, on what is kept so far."""
    keep = whole = ratios.keep
    for part in chosen:
        test = part.preset.filter
        if test is None or test.signed != signed:
            continue
        seen = replace(ratios, log_ratio=at(test.level), keep=keep)
        if test.gate is not None:
            own = test.gate(seen, part.constants)
            seen = replace(seen, gate=gating.apply(part.preset.name, own))
        passed = test.keep(seen, part.constants)
        keep = keep & passed
        if test.level.whole_episode:
            whole = whole & passed
    return _Screened(keep=keep, whole=whole)


def _mean(weight: Tensor, keep: Tensor) -> Tensor:
    """[] mean over the kept tokens; 1 if all weights are 0, which then stay so."""
    mean = weight.double().sum() / keep.sum().clamp(min=1)
    return torch.where(mean > 0, mean, 1.0)


def _any_token(gap: PolicyGap, flags: Tensor) -> Tensor:
    """[E] bool: the episode has a flagged token."""
    return gap.episode_sum(flags) > 0
