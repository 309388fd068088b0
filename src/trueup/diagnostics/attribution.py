"""The gap of each token split by cause, as far as that is identifiable.

d = log π_old − log μ = [log π_old − log π_v] staleness + [log π_v − log π_v^cache] cache
+ [log π_v^cache − log μ] engine, where π_v is the trainer's numerics at the version that sampled
the token, and π_v^cache the same behind keys and values that older versions wrote (π_v where none
did). Any inserted policy telescopes; these mean something because only weights change in the first
term, only the weights behind the cache in the second, and only arithmetic in the third.

Signed means add up, means of |·| do not. A share is E[d_i·d] / E[d²]; shares sum to 1. The floor
of an engine is its own term over all tokens. Intervals are percentile bootstraps over episodes,
because tokens of one episode are not independent.

A score is itself uncertain: the same weights on the same tokens in another micro-batch give another
log-prob, in bfloat16 by more than a small update moves it. With variance σ² of one score, the total
and the engine term hold σ², and staleness and cache hold 2σ² where both their ends were scored;
second moments are given with and without. A token of the current version, or one behind a cache of
its own version, is scored once for both ends: it has no such noise.

Shapes: N action tokens, E episodes, R resamples, P = 4 parts (total, staleness, cache, engine).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.diagnostics.groups import BREAKDOWNS, Grouping
from trueup.gap import PolicyGap


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One term of the gap."""

    mean: float
    """Signed mean in nats."""
    abs_mean: float
    """Mean absolute value in nats."""
    second_moment: float
    """E[d_i²] in nats²."""
    noise: float
    """What of it the scorer alone explains, in nats²."""
    share: float
    """E[d_i·d] / E[d²]: its share of the second moment; 0 when there is no gap at all."""
    share_above_noise: float
    """The same with the scorer's noise taken out of both; 0 when nothing is above it."""
    mean_interval: tuple[float, float]
    share_interval: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsOfGroup:
    """Means of the terms over the scored tokens of one group, in nats."""

    low: float
    """Least value of what was grouped by."""
    high: float
    """Largest value, exclusive but for that of the last bin; `low` where one value is a group."""
    scored: int
    total_mean: float
    staleness_mean: float
    cache_mean: float
    engine_mean: float
    staleness_abs: float
    cache_abs: float
    engine_abs: float
    """Of an engine's group: its floor."""
    staleness_share: float
    """E[staleness·d] / E[d²]; 0 when there is no gap at all."""
    cache_share: float
    """Likewise; the engine's is the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """The parts of the gap over the scored tokens; all 0 if none is scored."""

    tokens: int
    """Valid action tokens."""
    scored: int
    """Those whose log π_v is known: the ones split here."""
    total: Part
    staleness: Part
    cache: Part
    engine: Part
    variance_staleness: float
    """Population variances of the parts, and the covariance of staleness and engine, in nats²."""
    variance_cache: float
    variance_engine: float
    covariance: float
    scorer_noise: float
    """σ of one score in nats; 0 if it was not measured."""
    breakdowns: Mapping[str, tuple[PartsOfGroup, ...]]
    """By the names of `groups.BREAKDOWNS`, ascending, groups with scored tokens only."""

    @property
    def floor(self) -> float:
        """Mean |engine part|: no correction and no synchronisation goes below it."""
        return self.engine.abs_mean


_P = 4
"""Parts: total, staleness, cache, engine."""

_DRAWS = 1 << 22
"""Episodes drawn at a time by the bootstrap, which bounds its memory."""


def repeat_variance(first: Tensor, second: Tensor) -> Tensor:
    """σ² of one score in nats², from two scores of the same tokens in different micro-batches.

    Args:
        first: [N] log-probs.
        second: [N] log-probs of the same weights; NaN where not scored again.
    """
    again = torch.isfinite(second)
    half = (first.double() - second.double()).square() / 2
    return torch.where(again, half, 0.0).sum() / again.sum().clamp(min=1)


def attribution(
    gap: PolicyGap,
    *,
    advantage: Tensor | None = None,
    scorer_variance: float = 0.0,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Attribution:
    """Split the gap of a step batch by cause.

    Args:
        gap: The step batch; `logp_version` is finite where a token was scored.
        advantage: [N] advantages, for the breakdown by their sign; None: that one is empty.
        scorer_variance: σ² of one score in nats² (see `repeat_variance`).
        resamples: Bootstrap resamples of the episodes, R ≥ 1.
        level: Coverage of the intervals.
        seed: Of the resampling.
    """
    parts, scored = _parts(gap)  # [P, N] float64, 0 where not scored; [N] bool
    d = parts[0]
    rows = torch.cat([parts, parts.abs(), parts.square(), parts * d, scored.double()[None]])
    # Columns: parts, |parts|, parts², parts · d, n.
    sums = _of_episodes(gap).sums(rows).T  # [E, 4P + 1]
    total = sums.sum(0, keepdim=True)
    whole = _moments(total)  # [1, 4P]
    spread = _moments(_resample(sums, resamples, seed))  # [R, 4P]
    tail = (1 - level) / 2
    ordered = spread.sort(0).values
    low, high = (ordered[round(share * (len(ordered) - 1))].tolist() for share in (tail, 1 - tail))
    value = whole[0].tolist()
    mean, size, second, share = (value[first : first + _P] for first in range(0, 4 * _P, _P))
    num = int(total[0, -1])
    noise, shared = _noise(parts, scored)
    noise, shared = [scorer_variance * x for x in noise], [scorer_variance * x for x in shared]
    above = max(second[0] - noise[0], 0.0)
    total_part, staleness, cache, engine = (
        Part(
            mean=mean[i],
            abs_mean=size[i],
            second_moment=second[i],
            noise=noise[i] if num else 0.0,
            share=share[i],
            share_above_noise=(share[i] * second[0] - shared[i]) / above if above else 0.0,
            mean_interval=(low[i], high[i]),
            share_interval=(low[3 * _P + i], high[3 * _P + i]),
        )
        for i in range(_P)
    )
    cross = float((parts[1] * parts[3]).sum()) / max(num, 1)
    known = torch.zeros_like(gap.logp_target) if advantage is None else advantage
    return Attribution(
        tokens=int(gap.valid.sum()),
        scored=num,
        total=total_part,
        staleness=staleness,
        cache=cache,
        engine=engine,
        variance_staleness=second[1] - mean[1] ** 2,
        variance_cache=second[2] - mean[2] ** 2,
        variance_engine=second[3] - mean[3] ** 2,
        covariance=cross - mean[1] * mean[3],
        scorer_noise=scorer_variance**0.5,
        breakdowns={
            name: _groups(group(gap, known), rows)
            for name, group in BREAKDOWNS.items()
            if name != "advantage" or advantage is not None
        },
    )


def _parts(gap: PolicyGap) -> tuple[Tensor, Tensor]:
    """The terms [P, N], 0 where not scored, and where they are [N]."""
    version = gap.logp_version
    if version is None:
        empty = gap.logp_target.new_zeros(_P, gap.num_tokens, dtype=torch.float64)
        return empty, torch.zeros_like(gap.valid)
    behind = version if gap.logp_cache is None else gap.logp_cache
    scored = gap.valid & torch.isfinite(version) & torch.isfinite(behind)
    # Differences of float32 log-probs are exact in float64, so the parts sum to the total exactly.
    target, middle, cached, behaviour = (
        torch.where(scored, x, 0.0).double()
        for x in (gap.logp_target, version, behind, gap.logp_behaviour)
    )
    terms = [target - behaviour, target - middle, middle - cached, cached - behaviour]
    return torch.stack(terms), scored


def _noise(parts: Tensor, scored: Tensor) -> tuple[list[float], list[float]]:
    """What one score's variance adds to E[part²], and to E[part · d], in units of it.

    The log-probs of target, version and cache each have the noise of a score of their own, but
    those that are one score: then the part between them is 0.
    """
    stale, kept = parts[1] != 0, parts[2] != 0

    def share(where: Tensor) -> float:
        return float((where & scored).sum()) / max(int(scored.sum()), 1)

    added = [1.0, 2 * share(stale), 2 * share(kept), 1.0]
    shared = [1.0, share(stale), share(kept & ~stale), share(~kept & ~stale)]
    return added, shared


def _of_episodes(gap: PolicyGap) -> Grouping:
    every = tuple(float(e) for e in range(gap.num_episodes))
    return Grouping(index=gap.episode, low=every, high=every)


def _resample(sums: Tensor, resamples: int, seed: int) -> Tensor:
    """Sums of R bootstrap samples of the episodes that hold tokens, [R, columns]."""
    held = sums[sums[:, -1] > 0]
    num = len(held)
    if not num:
        return sums.new_zeros(1, sums.shape[1])
    generator = torch.Generator().manual_seed(seed)
    rows = max(1, _DRAWS // num)
    parts = []
    for start in range(0, resamples, rows):
        shape = (min(rows, resamples - start), num)
        drawn = torch.randint(num, shape, generator=generator).to(sums.device)
        # [r, E] how often each episode was drawn
        times = sums.new_zeros(shape).scatter_add(1, drawn, sums.new_ones(shape))
        parts.append(times @ held)
    return torch.cat(parts)


def _moments(sums: Tensor) -> Tensor:
    """Means, absolute means, second moments and shares [R, 4P] from sums [R, 4P + 1]."""
    count = sums[:, -1:].clamp(min=1)
    second = sums[:, 2 * _P : 2 * _P + 1]  # Σ d²
    shares = torch.where(second > 0, sums[:, 3 * _P : 4 * _P] / second, 0.0)
    return torch.cat([sums[:, : 3 * _P] / count, shares], 1)


def _groups(grouping: Grouping, rows: Tensor) -> tuple[PartsOfGroup, ...]:
    sums = grouping.sums(rows).T  # [K, 4P + 1]
    counts = sums[:, -1].tolist()
    found = zip(grouping.low, grouping.high, counts, _moments(sums).tolist(), strict=True)
    return tuple(
        PartsOfGroup(
            low=low,
            high=high,
            scored=int(count),
            total_mean=value[0],
            staleness_mean=value[1],
            cache_mean=value[2],
            engine_mean=value[3],
            staleness_abs=value[_P + 1],
            cache_abs=value[_P + 2],
            engine_abs=value[_P + 3],
            staleness_share=value[3 * _P + 1],
            cache_share=value[3 * _P + 2],
        )
        for low, high, count, value in found
        if count
    )
