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
weights. Both are proxies: what the gradient does is told by `cosine`, where inputs and outputs of
the LM head are given, from which its per-token gradients follow. Token ratios know nothing of the
prefix; for presets at the level of a product `left` also counts the correction of the prefix.

Shapes: N action tokens, E episodes, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.corrections.base import Correction
from trueup.corrections.compose import ZeroVarianceKind, correct
from trueup.corrections.table import PRESETS
from trueup.diagnostics.gradients import head_inner_products
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
    """cos(Σ wA's, Σ ρAs) over the LM head, mean over the step batches; None if not known."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """What the LM head read and said at the action tokens of a step batch."""

    hidden: Tensor
    """[N, H]."""
    logits: Tensor
    """[N, V], before the temperature."""
    token: Tensor
    """[N] int64 sampled tokens."""
    temperature: float = 1.0


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
    heads: Sequence[Head] | None = None,
) -> Comparison:
    """Apply presets to recorded step batches.

    Args:
        batches: Recorded step batches; statistics are over all of them.
        presets: Names of the table, in the order of the rows.
        replay: Rules that all presets share.
        heads: One per batch, for `Row.cosine`; N²·(V + H) multiplications.

    Raises:
        ConfigError: A preset is unknown.
        DataError: No action token can take part, or heads and tokens differ in number.
    """
    replay = replay or Replay()
    uncorrected = [replay(gap, "none") for gap in batches]
    reference = _Reference.of(batches, uncorrected)
    decided: dict[str, list[Correction]] = {}
    refused: dict[str, str] = {}
    for name in presets:
        try:
            decided[name] = [replay(gap, name) for gap in batches]
        except DataError as error:  # it reads what was not recorded
            refused[name] = error.message
    cosines = {} if heads is None else _cosines(batches, uncorrected, decided, heads)
    rows = [_row(name, found, reference, cosines.get(name)) for name, found in decided.items()]
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

    @classmethod
    def of(cls, batches: Sequence[PolicyGap], uncorrected: Sequence[Correction]) -> _Reference:
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
        return cls(
            base=base,
            ratio=exp_clamped(_joined([gap.log_ratio for gap in batches])[base].double()),
            advantage=_joined([c.advantages for c in uncorrected])[base].double(),
            episode=episode,
            quarter=_quarters(episode),
            rewarded=rewarded,
        )


def _row(
    name: str, decided: Sequence[Correction], reference: _Reference, cosine: float | None
) -> Row:
    metrics: dict[str, Metric] = {}
    for correction in decided:
        for key, metric in correction.metrics.items():
            metrics[key] = metrics[key].merge(metric) if key in metrics else metric
    over_cap = metrics.get("weight/over_cap")
    weight, tokens = (metrics.get(key, _NOTHING) for key in ("weight/applied", "kept/tokens"))
    keep = _joined([c.keep for c in decided])[reference.base]
    applied = _joined([_coefficient(c) for c in decided])[reference.base]
    full = reference.ratio * reference.advantage
    rest, scale = full - applied, full.abs().sum()
    return Row(
        preset=name,
        weight_mean=weight.mean if weight.count else 0.0,
        weight_max=weight.max,
        over_cap=None if over_cap is None else over_cap.mean,
        ess_tokens=metrics["ess/applied_tokens"].mean,
        ess_episodes=metrics["ess/applied_episodes"].mean,
        kept=_kept(keep, reference),
        left=_ratio(rest.abs().sum(), scale),
        net=_ratio(rest.sum().abs(), scale),
        second=_ratio(applied.square().sum(), reference.advantage.square().sum()),
        denominator_all=tokens.count / len(decided),
        denominator_kept=tokens.sum / len(decided),
        cosine=cosine,
    )


_NOTHING = Metric(sum=0.0, count=0.0, min=0.0, max=0.0)
"""Of a preset that leaves no group with contrast."""


def _coefficient(correction: Correction) -> Tensor:
    """[N] float64 wA': what multiplies the score of each token."""
    product = correction.weight.double() * correction.advantages.double()
    return torch.where(correction.keep, product, 0.0)


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


def _cosines(
    batches: Sequence[PolicyGap],
    uncorrected: Sequence[Correction],
    decided: Mapping[str, Sequence[Correction]],
    heads: Sequence[Head],
) -> dict[str, float]:
    """By preset, the mean over the step batches in which both gradients are not 0."""
    found: dict[str, list[float]] = {name: [] for name in decided}
    for at, (gap, head) in enumerate(zip(batches, heads, strict=True)):
        full = exp_clamped(gap.log_ratio.double()) * _coefficient(uncorrected[at])
        products = head_inner_products(
            head.hidden,
            head.logits,
            head.token,
            {"full ratio": full, **{name: _coefficient(c[at]) for name, c in decided.items()}},
            torch.zeros_like(head.token),
            1,
            temperature=head.temperature,
        )[:, 0, :, 0]
        for name, inner, square in zip(
            decided, products[0, 1:].tolist(), products.diagonal()[1:].tolist(), strict=True
        ):
            scale = (float(products[0, 0]) * square) ** 0.5
            if scale:
                found[name].append(inner / scale)
    return {name: sum(cosines) / len(cosines) for name, cosines in found.items() if cosines}


def _ratio(part: Tensor, whole: Tensor) -> float | None:
    return float(part) / float(whole) if float(whole) else None


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)).cpu()
