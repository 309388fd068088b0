"""What a correction records: raw and applied, under the names of the metric table.

Raw statistics are over the action tokens with a known behaviour log-prob, before cap and filters,
so that an outlier stays visible after it has been bounded. Applied ones count a rejected token as 0
and leave out the groups that were dropped for want of contrast.

Shapes: N action tokens, E episodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.diagnostics.effective_size import episode_log_weight, ess_ratio
from trueup.diagnostics.metrics import Metric, Values, metrics_of
from trueup.diagnostics.mismatch import mismatch_values
from trueup.diagnostics.retention import retention_values
from trueup.gap import PolicyGap, exp_clamped
from trueup.losses.advantages import GroupAdvantages


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was decided for a step batch."""

    log_ratio: Tensor
    """[N] at the preset's level."""
    advantage: Tensor
    """[N] unweighted; 0 without contrast."""
    weight: Tensor
    """[N] applied; 0 where not kept."""
    repeated: bool
    """The weight is that of the episode, repeated on each of its tokens."""
    keep: Tensor
    """[N] bool."""
    present: Tensor
    """[N] bool: the token's group has not been dropped for want of contrast."""
    counted: Tensor
    """[E] bool: in its group's baseline."""
    grouped: GroupAdvantages
    over_bound: Tensor
    """[N] bool: lag beyond the bound."""
    cap: float | None
    """Largest raw ratio that is not over the cap."""
    factors: Mapping[str, Tensor]


def correction_metrics(gap: PolicyGap, outcome: Outcome) -> dict[str, Metric]:
    """All metrics of a correction, with one transfer to the host."""
    valid, d = gap.valid, gap.log_ratio.double()
    raw = exp_clamped(outcome.log_ratio)
    num_valid, num_kept = gap.episode_sum(valid), gap.episode_sum(outcome.keep)
    seen, sample = gap.length > 0, valid & outcome.present
    applied = torch.where(outcome.keep, outcome.weight.double().log(), -torch.inf)
    values: dict[str, Values] = {
        **mismatch_values(gap),
        **retention_values(
            gap,
            keep=outcome.keep,
            among=sample,
            advantage=outcome.advantage,
            weight=outcome.weight,
        ),
        "weight/raw": (raw, valid),
        "weight/applied": (outcome.weight, sample),
        "ess/raw_tokens": ess_ratio(d, valid),
        "ess/raw_episodes": ess_ratio(episode_log_weight(gap, d, kept=valid, among=valid)),
        "ess/applied_tokens": ess_ratio(applied, sample),
        "ess/applied_episodes": ess_ratio(
            episode_log_weight(
                gap, applied, kept=outcome.keep, among=sample, repeated=outcome.repeated
            )
        ),
        "kept/tokens": (outcome.keep, outcome.present),
        "kept/episodes": (num_kept > 0, seen),
        "excluded/over_bound": outcome.over_bound,
        "excluded/garbage_episodes": seen & (num_valid == 0),
        "excluded/empty_episodes": ~seen,
        "excluded/filtered_episodes": (num_valid > 0) & ~outcome.counted,
        "group/no_contrast": outcome.grouped.num_without_contrast,
        "group/with_contrast": outcome.grouped.num_with_contrast,
        "advantage/value": (outcome.grouped.value, outcome.counted & (num_kept > 0)),
        **outcome.factors,
    }
    if outcome.cap is not None:
        values["weight/over_cap"] = (raw > outcome.cap, valid)
    return metrics_of(values)
