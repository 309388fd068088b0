"""Who is left after filters: what was kept of the batch, by length, reward and advantage.

A filter that compares a *product* of ratios over an episode with fixed bounds rejects by length:
its log is a sum, whose spread grows with the square root of the number of tokens. So what is kept
is compared with what came in, episode by episode.

Shapes: N action tokens, E episodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.diagnostics.groups import Grouping, by_value
from trueup.diagnostics.metrics import Values
from trueup.diagnostics.numerics import quantile, to_host
from trueup.gap import PolicyGap


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptOfGroup:
    """What was kept of the episodes of one group."""

    low: float
    """Least value of what was grouped by."""
    high: float
    """Largest value."""
    episodes: int
    kept_episodes: float
    """Share with a token in the loss."""
    kept_tokens: float
    """Share of their action tokens that is in the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Kept shares of a step batch; 0 without tokens."""

    tokens: float
    """Share of the action tokens in the loss."""
    episodes: float
    """Share of the episodes with a token in the loss, among those with tokens."""
    advantage_mass: float
    """Σ|A| of the tokens in the loss / Σ|A|; 0 without advantages."""
    by_length: tuple[KeptOfGroup, ...]
    """Episodes by action tokens: a group per length, or up to four of equal size."""
    by_reward: tuple[KeptOfGroup, ...]
    """Episodes by the sign of the reward."""
    by_advantage: tuple[KeptOfGroup, ...]
    """Episodes by the sign of the advantage; empty without advantages."""
    amplification: float
    """std(A·w)/std(A), see `variance_amplification`; 0 without advantages or weights."""


def retention(
    gap: PolicyGap,
    *,
    keep: Tensor,
    advantage: Tensor | None = None,
    weight: Tensor | None = None,
    among: Tensor | None = None,
) -> Retention:
    """Compare what was kept with what came in.

    Args:
        gap: The step batch.
        keep: [N] bool, the tokens in the loss.
        advantage: [N] unweighted advantages.
        weight: [N] applied weights.
        among: [N] bool, the tokens that could have been kept; None for all.
    """
    sample = torch.ones_like(keep) if among is None else among
    kept = keep & sample
    length, kept_tokens = _of_episodes(gap, sample), _of_episodes(gap, kept)
    seen = length > 0
    columns = torch.stack([seen.double(), (kept_tokens > 0).double(), length, kept_tokens])
    whole = columns.sum(1)
    zero = whole.new_zeros(())
    mass = (zero, zero)
    signs: tuple[KeptOfGroup, ...] = ()
    if advantage is not None:
        size = torch.where(sample, advantage, 0.0).double().abs()
        mass = (torch.where(kept, size, 0.0).sum(), size.sum())
        of_episode = length.new_zeros(gap.num_episodes)
        of_episode[gap.episode] = advantage.double()
        signs = _groups(by_value(of_episode.sign()), columns)
    growth = zero
    if advantage is not None and weight is not None:
        growth = variance_amplification(advantage, weight, kept, sample)
    episodes, kept_episodes, tokens, in_loss, left, all_mass, grown = to_host(
        [*whole, *mass, growth]
    )
    return Retention(
        tokens=in_loss / tokens if tokens else 0.0,
        episodes=kept_episodes / episodes if episodes else 0.0,
        advantage_mass=left / all_mass if all_mass else 0.0,
        by_length=_groups(_lengths(length, seen), columns),
        by_reward=_groups(by_value(gap.reward.sign()), columns),
        by_advantage=signs,
        amplification=grown,
    )


def variance_amplification(
    advantage: Tensor, weight: Tensor, keep: Tensor, among: Tensor
) -> Tensor:
    """std(A·w)/std(A) over the sample, a rejected token with weight 0; 0 if all A are 0.

    Population standard deviations, about 0 where the advantages are all equal (there is then no
    spread that the weights could add to): √(E[A²w²]/E[A²]).

    Args:
        advantage: [N].
        weight: [N].
        keep: [N] bool.
        among: [N] bool, the sample.
    """
    if not len(advantage):
        return torch.zeros((), dtype=torch.float64, device=advantage.device)
    count = among.sum().clamp(min=1)
    a = torch.where(among, advantage, 0.0).double()
    aw = torch.where(keep & among, advantage * weight, 0.0).double()
    second = torch.stack([aw.square().sum(), a.square().sum()]) / count
    centre = torch.stack([aw.sum(), a.sum()]) / count
    low = torch.where(among, advantage, torch.inf).min()
    high = torch.where(among, advantage, -torch.inf).max()
    top, bottom = torch.where(high > low, second - centre.square(), second).clamp(min=0.0)
    return torch.where(bottom > 0, top / torch.where(bottom > 0, bottom, 1.0), 0.0).sqrt()


def retention_values(
    gap: PolicyGap, *, keep: Tensor, among: Tensor, advantage: Tensor, weight: Tensor
) -> Mapping[str, Values]:
    """The same for the metric table, without a transfer to the host (see `metrics_of`)."""
    length = _of_episodes(gap, among)
    in_loss = _of_episodes(gap, keep) > 0
    seen = length > 0
    ordered = length[seen].sort().values
    quarter, three = quantile(ordered, 0.25), quantile(ordered, 0.75)
    apart = quarter < three
    positive = gap.reward > 0
    return {
        "kept/advantage_mass": (keep, among, advantage.abs()),
        "kept/positive_reward": (keep, among & positive[gap.episode]),
        "kept/other_reward": (keep, among & ~positive[gap.episode]),
        "kept/shortest_quarter": (in_loss, seen & apart & (length <= quarter)),
        "kept/longest_quarter": (in_loss, seen & apart & (length >= three)),
        "kept/episode_tokens": (length, in_loss),
        "kept/episode_reward": (gap.reward, in_loss),
        "advantage/amplification": variance_amplification(advantage, weight, keep, among),
    }


def _of_episodes(gap: PolicyGap, flags: Tensor) -> Tensor:
    """[E] float64 flagged tokens of each episode."""
    return gap.episode_sum(flags)


def _lengths(length: Tensor, seen: Tensor) -> Grouping:
    """Episodes by length: a group per length if there are few, else quarters."""
    every = by_value(length)
    if len(every.low) <= 8:
        return every
    lengths = length[seen].sort().values
    limits = to_host([quantile(lengths, share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)])
    index = torch.bucketize(length, length.new_tensor(limits[1:-1]))
    return Grouping(index=index, low=tuple(limits[:-1]), high=tuple(limits[1:]))


def _groups(grouping: Grouping, columns: Tensor) -> tuple[KeptOfGroup, ...]:
    rows = zip(grouping.low, grouping.high, *grouping.sums(columns).tolist(), strict=True)
    return tuple(
        KeptOfGroup(
            low=low,
            high=high,
            episodes=int(episodes),
            kept_episodes=kept / episodes,
            kept_tokens=kept_tokens / tokens,
        )
        for low, high, episodes, kept, tokens, kept_tokens in rows
        if episodes
    )
