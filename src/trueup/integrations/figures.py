"""Metrics as the plain numbers that other trainers log."""

from __future__ import annotations

from collections.abc import Mapping

from trueup.diagnostics.metrics import METRICS, Metric

_WITH_MAXIMUM = ("gap/abs_log_ratio", "weight/raw", "weight/applied")
"""Metrics whose largest value says something that the figure of the table does not."""


def figures(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The figure that the metric table names for each metric, and `<name>/max` of a few."""
    found = {}
    for name, metric in metrics.items():
        reducer = METRICS[name].reducer
        found[name] = metric.mean if reducer in ("mean", "batch") else getattr(metric, reducer)
    found.update({f"{name}/max": metrics[name].max for name in _WITH_MAXIMUM if name in metrics})
    return found
