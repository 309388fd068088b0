"""The figures that verl logs of a rollout correction, under its names, in one pass over the tokens.

Token weights are min(ρ, cap) of every action token, before any rejection, as verl takes them; the
geometric filter is its `seq_mean_k1`. Everything follows from a few sums per episode and a few
extremes, accumulated chunk by chunk so that a chunk stays in the processor's cache.

Where verl's figure is not what its name says, its own value is kept: this is for dashboards that
already exist. trueup's metrics (`diagnostics.metrics`) are the ones to judge by.

Shapes: N action tokens, E episodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.errors import DataError
from trueup.gap import LOG_RATIO_LIMIT, PolicyGap, exp_clamped, run_sums

_CHUNK = 1 << 18
"""Tokens of a chunk on a CPU: small enough that temporaries stay in cache and memory does not grow
with the batch, large enough that threads seldom wait for each other."""


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """What one pass over the tokens leaves, float64."""

    count: Tensor
    """[E] tokens with a known log μ, of each episode that has any."""
    target: Tensor
    """[E] Σ log π_old."""
    log_ratio: Tensor
    """[E] Σ d."""
    raw: Tensor
    """[E] Σ ρ."""
    weight: Tensor
    """[E] Σ w."""
    totals: Tensor
    """[5] Σ w², Σ ρ², Σ (ρ − 1 − d), and how many tokens are above C and below 1/C."""
    low: Tensor
    """[] min w."""
    high: Tensor
    """[] max w."""


@torch.no_grad()
def verl_metrics(
    gap: PolicyGap, *, cap: float, band: tuple[float, float] | None = None
) -> dict[str, float]:
    """Verl's `rollout_corr/*` figures of token truncation with an optional geometric filter.

    Args:
        gap: The step batch.
        cap: C; a ratio above it, or below 1/C, counts as out of range.
        band: Bounds (lo, hi) of the geometric mean ratio of an episode.

    Raises:
        DataError: No action token has a known behaviour log-prob.
    """
    if not bool(gap.valid.any()):
        raise DataError(field="logp_behaviour", rule="known for some action token", value=None)
    sums = _accumulate(gap, cap)
    figures = _weight_figures(sums, cap) | _policy_figures(sums)
    figures |= {} if band is None else _filter_figures(sums, band)
    values: list[float] = torch.stack([v.double() for v in figures.values()]).tolist()
    return {f"rollout_corr/{name}": value for name, value in zip(figures, values, strict=True)}


def _accumulate(gap: PolicyGap, cap: float) -> _Sums:
    """One pass over the tokens with a known log μ."""
    target, behaviour, length = _known(gap)
    totals = torch.zeros(5, dtype=torch.float64, device=target.device)
    columns = []
    low, high = totals.new_tensor(math.inf), totals.new_tensor(-math.inf)
    for tokens, episodes in _chunks(length, size=_CHUNK if target.device.type == "cpu" else None):
        part, size = target[tokens], length[episodes]
        d = part - behaviour[tokens]
        raw = exp_clamped(d)
        weight = raw.clamp(max=cap)
        columns.append(torch.stack([run_sums(x, size) for x in (part, d, raw, weight)]))
        # ρ − 1 − d without the cancellation that a difference of near-equal numbers has.
        k3 = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).expm1_().sub_(d).sum(dtype=torch.float64)
        totals += torch.stack(
            [
                _square_sum(weight),
                _square_sum(raw),
                k3,
                (raw > cap).count_nonzero().double(),
                (raw < 1 / cap).count_nonzero().double(),
            ]
        )
        least, largest = weight.aminmax()
        low, high = torch.minimum(low, least), torch.maximum(high, largest)
    of_target, of_d, of_raw, of_weight = torch.cat(columns, 1)
    return _Sums(
        count=length.double(),
        target=of_target,
        log_ratio=of_d,
        raw=of_raw,
        weight=of_weight,
        totals=totals,
        low=low,
        high=high,
    )


def _known(gap: PolicyGap) -> tuple[Tensor, Tensor, Tensor]:
    """Target and behaviour where log μ is known, and their number in each episode with any."""
    known = gap.valid
    if bool(known.all()):
        return gap.logp_target, gap.logp_behaviour, gap.length[gap.length > 0]
    length = gap.episode_sum(known).long()
    return gap.logp_target[known], gap.logp_behaviour[known], length[length > 0]


def _chunks(length: Tensor, *, size: int | None) -> Iterator[tuple[slice, slice]]:
    """Slices of tokens and of their episodes: whole episodes, `size` tokens or a little more."""
    ends = length.cumsum(0).tolist()
    start = first = 0
    for episode, end in enumerate(ends, 1):
        if end - start >= (size or math.inf) or episode == len(ends):
            yield slice(start, end), slice(first, episode)
            start, first = end, episode


def _square_sum(values: Tensor) -> Tensor:
    return values.square().sum(dtype=torch.float64)


def _weight_figures(sums: _Sums, cap: float) -> dict[str, Tensor]:
    """Of the token weights, and of their mean in each episode."""
    total = sums.count.sum()
    squares, _, _, above, below = sums.totals / total
    mean = sums.weight.sum() / total
    of_episode, raw_of_episode = sums.weight / sums.count, sums.raw / sums.count
    return {
        "rollout_is_mean": mean,
        "rollout_is_ratio_fraction_high": above,
        "rollout_is_ratio_fraction_low": below,
        "rollout_is_max": sums.high,
        "rollout_is_min": sums.low,
        "rollout_is_std": (squares - mean.square()).clamp(min=0).sqrt(),
        "rollout_is_eff_sample_size": (mean.square() / squares).clamp(max=1.0),
        "rollout_is_seq_mean": of_episode.mean(),
        "rollout_is_seq_std": _sample_std(of_episode),
        "rollout_is_seq_max": of_episode.max(),
        "rollout_is_seq_min": of_episode.min(),
        "rollout_is_seq_max_deviation": (of_episode - 1).abs().max(),
        "rollout_is_seq_fraction_high": (raw_of_episode > cap).double().mean(),
        "rollout_is_seq_fraction_low": (raw_of_episode < 1 / cap).double().mean(),
    }


def _policy_figures(sums: _Sums) -> dict[str, Tensor]:
    """Of the two policies; perplexities are means over episodes of e^(−mean log-prob)."""
    total = sums.count.sum()
    mean_target, mean_d = sums.target / sums.count, sums.log_ratio / sums.count
    mean_behaviour = mean_target - mean_d
    product = exp_clamped(sums.log_ratio)
    return {
        "training_ppl": (-mean_target).exp().mean(),
        "training_log_ppl": -mean_target.mean(),
        "kl": -sums.log_ratio.sum() / total,
        "k3_kl": sums.totals[2] / total,
        "rollout_ppl": (-mean_behaviour).exp().mean(),
        "rollout_log_ppl": -mean_behaviour.mean(),
        "log_ppl_diff": -mean_d.mean(),
        "log_ppl_abs_diff": mean_d.abs().mean(),
        "log_ppl_diff_max": (-mean_d).max(),
        "log_ppl_diff_min": (-mean_d).min(),
        "ppl_ratio": (-mean_d).exp().mean(),
        "chi2_token": sums.totals[1] / total - 1,
        "chi2_seq": product.square().mean() - 1,
    }


def _filter_figures(sums: _Sums, band: tuple[float, float]) -> dict[str, Tensor]:
    """Of the statistic −mean d of each episode against its bounds −log hi and −log lo."""
    k1, (low, high) = -sums.log_ratio / sums.count, (-math.log(band[1]), -math.log(band[0]))
    above, below = (k1 > high).double(), (k1 < low).double()
    share = sums.count / sums.count.sum()
    bounded = k1.clamp(low, high)
    spread = (share * bounded.square()).sum() - (share * bounded).sum().square()
    rejected = above + below
    figures = {
        "mean": (share * k1).sum(),
        "max": k1.max(),
        "min": k1.min(),
        "fraction_high": above.mean(),
        "fraction_low": below.mean(),
        "std": spread.clamp(min=0).sqrt(),
        "seq_mean": k1.mean(),
        "seq_std": _sample_std(k1),
        "seq_max": k1.max(),
        "seq_min": k1.min(),
        "seq_max_deviation": k1.abs().max(),
        "seq_fraction_high": above.mean(),
        "seq_fraction_low": below.mean(),
        "masked_fraction": (share * rejected).sum(),
        "seq_masked_fraction": rejected.mean(),
    }
    return {
        **{f"rollout_rs_seq_mean_k1_{name}": figure for name, figure in figures.items()},
        "rollout_rs_masked_fraction": figures["masked_fraction"],
        "rollout_rs_seq_masked_fraction": figures["seq_masked_fraction"],
    }


def _sample_std(values: Tensor) -> Tensor:
    return values.std() if len(values) > 1 else values.new_zeros(())
