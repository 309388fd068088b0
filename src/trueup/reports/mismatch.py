"""The figure of a measured mismatch: distributions of |d|, and its mean by probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trueup.reports.figure_data import Figure, Lines, Series, line

_POINTS = 200
"""Of one distribution."""
_LEAST = 1e-8
"""Nats: where the logarithmic axis ends, and below which a gap counts as none."""


def mismatch_figures(
    curves: Mapping[str, Sequence[float]], bins: Sequence[tuple[float, float, float]]
) -> list[Figure]:
    """Two panels.

    Args:
        curves: Comparison -> |d| of every token, ascending; one that agrees exactly is left out.
        bins: (lowest probability, highest, mean |d|) of the tokens in between.
    """
    return [_distributions(curves), _by_probability(bins)]


def _distributions(curves: Mapping[str, Sequence[float]]) -> Lines:
    shown = {name: values for name, values in curves.items() if values and values[-1] > _LEAST}
    return {
        "kind": "lines",
        "id": "mismatch",
        "title": "Distribution of |log π − log μ|",
        "caption": "Share of the tokens whose gap is below; pairs that agree exactly are left out.",
        "x": {"label": "nats", "scale": "log"},
        "y": {"label": "share of the tokens", "scale": "linear", "low": 0.0, "high": 1.0},
        "series": [_curve(name, values) for name, values in shown.items()],
        "rules": [],
    }


def _curve(name: str, values: Sequence[float]) -> Series:
    """The empirical distribution at evenly spaced ranks, from the least gap that is one."""
    last = len(values) - 1
    ranks = sorted({round(i * last / _POINTS) for i in range(_POINTS + 1)})
    points = [(values[r], (r + 1) / len(values)) for r in ranks if values[r] > _LEAST]
    return line(name, [x for x, _ in points], [y for _, y in points])


def _by_probability(bins: Sequence[tuple[float, float, float]]) -> Lines:
    series: Series = {
        "name": "fp32 trainer vs engine",
        "x": [(low + high) / 2 for low, high, _ in bins],
        "y": [mean for _, _, mean in bins],
        "mark": "points",
    }
    return {
        "kind": "lines",
        "id": "mismatch-by-probability",
        "title": "Mean |d| by engine probability of the token",
        "caption": "Uncertain tokens carry the mismatch; a bin stands at its middle.",
        "x": {"label": "engine probability", "scale": "linear", "low": 0.0, "high": 1.0},
        "y": {"label": "nats", "scale": "linear", "low": 0.0},
        "series": [series],
        "rules": [],
    }
