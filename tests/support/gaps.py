"""Gaps written out by hand."""

from collections.abc import Sequence

import torch

from trueup.gap import PolicyGap

Rows = Sequence[Sequence[float]]


def make_gap(
    target: Rows,
    behaviour: Rows,
    *,
    rewards: Sequence[float] | None = None,
    groups: Sequence[int] | None = None,
    lags: Sequence[Sequence[int]] | None = None,
    version_logps: Rows | None = None,
    turns: Sequence[Sequence[int]] | None = None,
) -> PolicyGap:
    """One row per episode, one segment each.

    One group, one turn, no lag and rewards 0, 1, 2, ... unless given.
    """
    lengths = [len(row) for row in behaviour]
    n, e = sum(lengths), len(lengths)
    lag, turn = (
        torch.tensor([x for row in rows for x in row] if rows else [0] * n, dtype=torch.int64)
        for rows in (lags, turns)
    )
    return PolicyGap(
        logp_target=_flat(target),
        logp_behaviour=_flat(behaviour),
        segment_offsets=torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0),
        segment_episode=torch.arange(e),
        group=torch.tensor(groups if groups is not None else [0] * e, dtype=torch.int64),
        reward=torch.tensor(rewards if rewards is not None else range(e), dtype=torch.float32),
        version=10 - lag,
        lag=lag,
        engine=torch.zeros(n, dtype=torch.int64),
        turn=turn,
        logp_version=None if version_logps is None else _flat(version_logps),
    )


def ratio_gap(log_ratios: Rows, **kwargs) -> PolicyGap:
    """A gap with exactly these d; NaN is a missing behaviour log-prob."""
    # d = target − behaviour with one of the two 0 is exact in float32.
    target = [[d if d <= 0 else 0.0 for d in row] for row in log_ratios]
    behaviour = [[-d if d > 0 else d * 0.0 for d in row] for row in log_ratios]
    return make_gap(target, behaviour, **kwargs)


def _flat(rows: Rows) -> torch.Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=torch.float32)
