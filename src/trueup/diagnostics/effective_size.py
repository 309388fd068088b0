"""Effective sample size as a share of the sample: (Σw)² / (n Σw²) = 1 / (1 + CV²), in (0, 1].

Computed from log-weights by log-sum-exp, so that products over a thousand tokens neither underflow
to 0/0 nor become equal by clamping. An episode is one sample, however long it is. A rejected sample
has weight 0 (log-weight −inf) and counts in n.

Shapes: N action tokens, E episodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.diagnostics.numerics import to_host
from trueup.gap import PolicyGap, distinct


@dataclass(frozen=True, slots=True, kw_only=True)
class LagEffectiveSize:
    """Token ESS ratio of one lag."""

    lag: int
    tokens: int
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveSize:
    """ESS ratios of a step batch; 0 when everything is rejected, never above 1."""

    tokens: float
    """Over the action tokens of the sample."""
    episodes: float
    """Over the episodes of these tokens, by the product of their token weights."""
    by_lag: tuple[LagEffectiveSize, ...]


def effective_size(
    gap: PolicyGap,
    *,
    weight: Tensor | None = None,
    keep: Tensor | None = None,
    among: Tensor | None = None,
) -> EffectiveSize:
    """ESS ratios of the raw ratios, or of the weights that a correction applied.

    Args:
        gap: The step batch.
        weight: [N] applied weights ≥ 0; None for the raw ratios ρ.
        keep: [N] bool, the tokens in the loss; None for all. A rejected token leaves the product of
            its episode; an episode without any kept token is rejected.
        among: [N] bool, the tokens that could have been kept; None for all.
    """
    log_weight = gap.log_ratio.double() if weight is None else weight.detach().double().log()
    sample = gap.valid if among is None else gap.valid & among
    kept = sample if keep is None else sample & keep
    of_token = torch.where(kept, log_weight, -torch.inf)[sample]
    of_episode = episode_log_weight(gap, log_weight, kept=kept, among=sample)
    lags, index = distinct(gap.lag[sample])
    bins = [of_token[index == i] for i in range(len(lags))]
    tokens, episodes, *ratios = to_host(
        [ess_ratio(of_token), ess_ratio(of_episode), *(ess_ratio(x) for x in bins)]
    )
    rows = zip(lags.tolist(), bins, ratios, strict=True)
    return EffectiveSize(
        tokens=tokens,
        episodes=episodes,
        by_lag=tuple(LagEffectiveSize(lag=v, tokens=len(x), ratio=r) for v, x, r in rows),
    )


def ess_ratio(log_weight: Tensor, among: Tensor | None = None) -> Tensor:
    """(Σw)² / (n Σw²) of n samples given as log w; 0 if all are −inf or there are none.

    Args:
        log_weight: [M].
        among: [M] bool, the n samples; None for all.
    """
    if not len(log_weight):
        return torch.zeros((), dtype=torch.float64, device=log_weight.device)
    x = log_weight.double()
    x = x if among is None else torch.where(among, x, -torch.inf)
    top = x.max()
    # Scale invariant: the largest weight is 1, so neither sum underflows; exact for equal weights.
    w = (x - torch.where(top == -torch.inf, 0.0, top)).exp_()
    squares = w.dot(w)
    num = len(x) if among is None else among.count_nonzero()
    ratio = w.sum().square() / (num * squares)
    return torch.where(squares > 0, ratio.clamp(max=1.0), 0.0)


def episode_log_weight(
    gap: PolicyGap, log_weight: Tensor, *, kept: Tensor, among: Tensor, repeated: bool = False
) -> Tensor:
    """Log of an episode's weight, for each episode with a token in the sample.

    That is the product of the weights of its kept tokens; or their common value if each of them
    already is the weight of the episode.

    Args:
        gap: The step batch.
        log_weight: [N] log-weights, float64.
        kept: [N] bool, subset of `among`.
        among: [N] bool, the sample.
        repeated: The weights are those of whole episodes, repeated on their tokens.

    Returns:
        [≤ E] float64; −inf for an episode without kept token.
    """
    sums = gap.episode_sum(torch.where(kept, log_weight, 0.0))
    num_kept, num_sampled = gap.episode_sum(kept), gap.episode_sum(among)
    if repeated:
        sums = sums / num_kept.clamp(min=1)
    return torch.where(num_kept > 0, sums, -torch.inf)[num_sampled > 0]
