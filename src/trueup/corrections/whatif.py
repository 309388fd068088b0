"""What other corrections would have done with the same tokens.

Every preset decides about the step batches as they were recorded, and its decision is measured
against two references on the same tokens: the uncorrected estimator (w = 1), and the token ratio ρ
itself, which leaves no bias where the log-probs are true. With A the advantage without any filter:

    left      Σ|ρA − wA'| / Σ|ρA|      what the preset leaves uncorrected, A' its own advantage
    net       |Σ(ρA − wA')| / Σ|ρA|    the same with its signs, so that moments may cancel
    second    Σ(wA')² / ΣA²            growth of the second moment over the uncorrected one

With score s the bias is E_μ[(ρA − wA')s], so ‖bias‖ ≤ max‖s‖ · E|ρA − wA'|: `left` bounds it, and
is an upper bound only [the term that truncation with bias correction adds back, Wang et al.
1611.01224 §3.2]. `second` times E‖s‖² bounds the variance of one token, if scores do not depend on
weights. Both are proxies: what the gradient does is told by `cosine`, where per-token score
gradients are given. Token ratios know nothing of the prefix; for presets at the level of a product
`left` also counts the correction of the prefix.

Shapes: N action tokens, E episodes, K components of a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.corrections.base import Correction
from trueup.corrections.compose import ZeroVarianceKind, correct
from trueup.corrections.table import PRESETS
from trueup.diagnostics.metrics import Metric
from trueup.errors import DataError
from trueup.gap import PolicyGap, distinct, exp_clamped
from trueup.losses.advantages import AdvantageKind
from trueup.losses.reduce import DenominatorKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How step batches become advantages and a denominator, whatever the preset."""

    advantage: AdvantageKind = "group_std"
    zero_variance: ZeroVarianceKind = "keep"
    denominator: DenominatorKind = "all"
    max_lag: int | None = None

    def __call__(self, gap: PolicyGap, preset: str) -> Correction:
        """What the preset decides about a step batch."""
        return correct(
            gap,
            preset=preset,
            advantage=self.advantage,
            zero_variance=self.zero_variance,
            denominator=self.denominator,
            max_lag=self.max_lag,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Shares of what takes part without any correction; None where there is nothing to share."""

    tokens: float | None
    episodes: float | None
    """Episodes with a token in the loss."""
    by_length: tuple[float | None, float | None, float | None, float | None]
    """Of the action tokens in each quarter of the episodes by length, shortest first."""
    rewarded: float | None
    """Of the action tokens in episodes with reward > 0."""
    unrewarded: float | None
    """Of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one preset would have done."""

    preset: str
    weight_mean: float
    """Of the weights in the loss, a rejected token counting 0."""
    weight_max: float
    over_cap: float | None
    """Share of the tokens whose raw ratio is above the cap; None without a cap."""
    ess_tokens: float
    """Mean over the step batches; so is `ess_episodes`."""
    ess_episodes: float
    kept: Kept
    left: float | None
    """Bound of the bias proxy; None without advantages, as are `net` and `second`."""
    net: float | None
    second: float | None
    denominator_all: float
    """Z of `all`, mean over the step batches."""
    denominator_kept: float
    """Z of `kept`."""
    cosine: float | None
    """cos(Σ wA's, Σ ρAs); None without gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What all presets would have done."""

    rows: tuple[Row, ...]
    refused: Mapping[str, str]
    """Presets that these step batches cannot serve, with the reason."""


@torch.no_grad()
def whatif(
    batches: Sequence[PolicyGap],
    *,
    presets: Sequence[str] = tuple(PRESETS),
    replay: Replay | None = None,
    gradients: Sequence[Tensor] | None = None,
) -> Comparison:
    """Apply presets to recorded step batches.

    Args:
        batches: Recorded step batches; statistics are over all of them.
        presets: Names of the table, in the order of the rows.
        replay: Rules that all presets share.
        gradients: Per batch [N, K] gradients of the tokens' log-probs, of any parameters.

    Raises:
        ConfigError: A preset is unknown.
        DataError: No action token can take part, or gradients and tokens differ in number.
    """
    replay = replay or Replay()
    reference = _Reference.of(batches, [replay(gap, "none") for gap in batches], gradients)
    rows, refused = [], {}
    for name in presets:
        try:
            decided = [replay(gap, name) for gap in batches]
        except DataError as error:  # it reads what was not recorded
            refused[name] = error.message
        else:
            rows.append(_row(name, decided, reference))
    return Comparison(rows=tuple(rows), refused=refused)


@dataclass(frozen=True, kw_only=True)
class _Reference:
    """What every preset is compared with, over the N tokens that take part without correction."""

    base: Tensor
    """[all tokens] bool: takes part without correction."""
    ratio: Tensor
    """[N] ρ, float64."""
    advantage: Tensor
    """[N] A, float64."""
    episode: Tensor
    """[N] int64, numbered through all step batches."""
    quarter: Tensor
    """[N] int64 in 0 ... 3, of the episode's length."""
    rewarded: Tensor
    """[N] bool."""
    gradients: Tensor | None
    """[N, K]."""

    @classmethod
    def of(
        cls,
        batches: Sequence[PolicyGap],
        uncorrected: Sequence[Correction],
        gradients: Sequence[Tensor] | None,
    ) -> _Reference:
        starts = torch.tensor([0, *(gap.num_episodes for gap in batches)]).cumsum(0).tolist()
        base = _joined([c.keep for c in uncorrected])
        if not bool(base.any()):
            raise DataError(
                field="step batches",
                rule="with an action token whose log μ is known",
                value=f"none of {len(base)}",
            )
        episode = _joined([g.episode + at for g, at in zip(batches, starts, strict=False)])[base]
        rewarded = _joined([(gap.reward > 0)[gap.episode] for gap in batches])[base]
        if gradients is not None:
            sizes = [len(part) for part in gradients]
            if sizes != [gap.num_tokens for gap in batches]:
                raise DataError(field="gradients", rule="one row per action token", value=sizes)
        return cls(
            base=base,
            ratio=exp_clamped(_joined([gap.log_ratio for gap in batches])[base].double()),
            advantage=_joined([c.advantages for c in uncorrected])[base].double(),
            episode=episode,
            quarter=_quarters(episode),
            rewarded=rewarded,
            gradients=None if gradients is None else _joined(gradients)[base].double(),
        )


def _row(name: str, decided: Sequence[Correction], reference: _Reference) -> Row:
    metrics: dict[str, Metric] = {}
    for correction in decided:
        for key, metric in correction.metrics.items():
            metrics[key] = metrics[key].merge(metric) if key in metrics else metric
    keep = _joined([c.keep for c in decided])[reference.base]
    weight = _joined([c.weight for c in decided])[reference.base].double()
    advantage = _joined([c.advantages for c in decided])[reference.base].double()
    applied = torch.where(keep, weight * advantage, 0.0)
    full = reference.ratio * reference.advantage
    scale, second = full.abs().sum(), reference.advantage.square().sum()
    rest = full - applied
    over_cap, tokens = metrics.get("weight/over_cap"), metrics["kept/tokens"]
    return Row(
        preset=name,
        weight_mean=metrics["weight/applied"].mean,
        weight_max=metrics["weight/applied"].max,
        over_cap=None if over_cap is None else over_cap.mean,
        ess_tokens=metrics["ess/applied_tokens"].mean,
        ess_episodes=metrics["ess/applied_episodes"].mean,
        kept=_kept(keep, reference),
        left=_ratio(rest.abs().sum(), scale),
        net=_ratio(rest.sum().abs(), scale),
        second=_ratio(applied.square().sum(), second),
        denominator_all=tokens.count / len(decided),
        denominator_kept=tokens.sum / len(decided),
        cosine=_cosine(applied, full, reference.gradients),
    )


def _kept(keep: Tensor, reference: _Reference) -> Kept:
    def share(where: Tensor) -> float | None:
        return _ratio((keep & where).sum(), where.sum())

    touched = torch.zeros(int(reference.episode.max()) + 1, dtype=torch.int64)
    seen = touched.index_add(0, reference.episode, torch.ones_like(reference.episode)) > 0
    left = touched.index_add(0, reference.episode, keep.long()) > 0
    first, second, third, fourth = (share(reference.quarter == q) for q in range(4))
    return Kept(
        tokens=share(torch.ones_like(keep)),
        episodes=_ratio(left.sum(), seen.sum()),
        by_length=(first, second, third, fourth),
        rewarded=share(reference.rewarded),
        unrewarded=share(~reference.rewarded),
    )


def _quarters(episode: Tensor) -> Tensor:
    """[N] quarter of the length of each token's episode, by mid-ranks: equal ones share theirs."""
    lengths = torch.bincount(episode)
    _, index = distinct(lengths[lengths > 0])
    count = torch.bincount(index)
    middle = (count.cumsum(0) - count / 2) / count.sum()  # share that is shorter
    quarter = torch.zeros_like(lengths)
    quarter[lengths > 0] = (4 * middle).long()[index]
    return quarter[episode]


def _cosine(applied: Tensor, full: Tensor, gradients: Tensor | None) -> float | None:
    if gradients is None:
        return None
    ours, best = applied @ gradients, full @ gradients
    return _ratio(ours @ best, ours.norm() * best.norm())


def _ratio(part: Tensor, whole: Tensor) -> float | None:
    return float(part) / float(whole) if float(whole) else None


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)).cpu()
