"""The one table of metrics, and the mergeable value each of them is stored as.

A metric is a sum, a count, a minimum and a maximum: partial values from shards or mini-batches
merge exactly, and a mean is never a mean of means. What no sum can express (an effective sample
size, a mixing coefficient) is a value of one whole step batch, and the table says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # readers of recorded metrics need no tensors
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A mergeable statistic of scalar values."""

    sum: float
    count: float
    min: float
    max: float

    @classmethod
    def of(cls, value: float) -> Metric:
        """A single value."""
        return cls(sum=value, count=1, min=value, max=value)

    @property
    def mean(self) -> float:
        """Sum / count; NaN without values."""
        return self.sum / self.count if self.count else math.nan

    def merge(self, other: Metric) -> Metric:
        """The statistic of both sets of values together."""
        return Metric(
            sum=self.sum + other.sum,
            count=self.count + other.count,
            min=min(self.min, other.min),
            max=max(self.max, other.max),
        )


Reducer = Literal["mean", "sum", "min", "max", "batch"]
"""Which part of a merged `Metric` is the figure; `batch`: one value per step batch, computed from
all of it, so that values of shards do not merge into the value of the whole."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """The one definition of a metric."""

    name: str
    """`family/name`."""
    unit: str
    reducer: Reducer
    meaning: str


_SPECS = (
    MetricSpec("gap/log_ratio", "nats", "mean", "d = log π_old − log μ; its mean is −k1"),
    MetricSpec("gap/abs_log_ratio", "nats", "mean", "|d|, the mismatch of one token"),
    MetricSpec("gap/k2", "nats", "mean", "½d², second-order estimate of KL(μ‖π)"),
    MetricSpec("gap/k3", "nats", "mean", "ρ − 1 − d ≥ 0, low-variance estimate of KL(μ‖π)"),
    MetricSpec("gap/probability", "1", "mean", "|π_old − μ| of the sampled token"),
    MetricSpec("gap/behaviour_logp", "nats", "mean", "log μ of the sampled token"),
    MetricSpec("gap/scored", "1", "mean", "share of action tokens scored under their own version"),
    MetricSpec("gap/staleness", "nats", "mean", "log π_old − log π_v of the scored tokens"),
    MetricSpec("gap/abs_staleness", "nats", "mean", "|log π_old − log π_v| of the scored tokens"),
    MetricSpec("gap/engine", "nats", "mean", "log π_v − log μ of the scored tokens"),
    MetricSpec("gap/abs_engine", "nats", "mean", "|log π_v − log μ|: the floor of the engine"),
    MetricSpec("gap/lag", "versions", "mean", "trainer's version − version that sampled the token"),
    MetricSpec("gap/calibration_z", "1", "batch", "(mean ρ − 1) / SE clustered by episode"),
    MetricSpec("weight/raw", "1", "mean", "ρ = e^d at the preset's level, before cap and filter"),
    MetricSpec(
        "weight/applied",
        "1",
        "mean",
        "weight in the loss; 0 for a rejected token of the step batch",
    ),
    MetricSpec("weight/over_cap", "1", "mean", "share of tokens whose raw ratio exceeds the cap"),
    MetricSpec("ess/raw_tokens", "1", "batch", "ESS ratio of the raw token weights"),
    MetricSpec("ess/raw_episodes", "1", "batch", "ESS ratio of the raw products over an episode"),
    MetricSpec("ess/applied_tokens", "1", "batch", "ESS ratio of the weights in the loss"),
    MetricSpec("ess/applied_episodes", "1", "batch", "the same, products over an episode"),
    MetricSpec(
        "kept/tokens", "1", "mean", "share of action tokens in the loss (count: Z of `all`)"
    ),
    MetricSpec("kept/episodes", "1", "mean", "share of episodes with a token in the loss"),
    MetricSpec(
        "excluded/missing_logp", "1", "mean", "share of action tokens without a known log μ"
    ),
    MetricSpec("excluded/over_bound", "1", "mean", "share of action tokens beyond the lag bound"),
    MetricSpec("excluded/garbage_episodes", "episodes", "sum", "no log μ at all: rejected"),
    MetricSpec("excluded/empty_episodes", "episodes", "sum", "no action token: excluded"),
    MetricSpec("excluded/filtered_episodes", "episodes", "sum", "rejected whole by the filter"),
    MetricSpec("group/no_contrast", "groups", "sum", "all remaining rewards equal: no advantage"),
    MetricSpec("group/with_contrast", "groups", "sum", "groups that teach something"),
    MetricSpec("advantage/value", "1", "mean", "advantage of an episode in the loss, unweighted"),
    MetricSpec("adaptive/alpha", "1", "batch", "mixing coefficient of the adaptive weight"),
    MetricSpec("adaptive/reliability", "1", "batch", "α_ess = √(ESS/n) of the capped weights"),
    MetricSpec("adaptive/necessity", "1", "batch", "α_mis = min(1, mean |d| / δ)"),
    MetricSpec("adaptive/inflation", "1", "batch", "α_var, growth of std(A·w) beyond γ"),
    MetricSpec("episode/reward", "1", "mean", "reward of an episode of the step batch"),
    MetricSpec("episode/tokens", "tokens", "mean", "action tokens of an episode"),
    MetricSpec("episode/reads", "1", "mean", "reads of an episode"),
    MetricSpec("update/grad_norm", "1", "mean", "norm of a mini-batch's gradient before clipping"),
    MetricSpec("update/skipped", "steps", "sum", "optimiser steps refused: gradient not finite"),
    MetricSpec("update/log_ratio", "nats", "mean", "log π_θ − log π_old of a token in the loss"),
    MetricSpec("update/clip_high", "1", "mean", "share of tokens with A > 0 clipped from above"),
    MetricSpec("update/clip_low", "1", "mean", "share of tokens with A < 0 clipped from below"),
)

METRICS: Mapping[str, MetricSpec] = {spec.name: spec for spec in _SPECS}
"""Every metric by name. To add one: a line in `_SPECS`, and the place that computes it."""


def metric_of(values: Tensor, where: Tensor | None = None) -> Metric:
    """Statistic of the selected values; the neutral element of `merge` when there are none."""
    return _metrics([(values, where)])[0]


def metrics_of(
    values: Mapping[str, Tensor | tuple[Tensor, Tensor | None]],
) -> dict[str, Metric]:
    """Statistics of many tensors with a single transfer to the host.

    Args:
        values: By metric name: a tensor, or a tensor and the bool mask of what counts.

    Returns:
        A metric per name; a metric without values is left out.
    """
    pairs = [v if isinstance(v, tuple) else (v, None) for v in values.values()]
    found = zip(values, _metrics(pairs), strict=True)
    return {name: metric for name, metric in found if metric.count}


def as_markdown() -> str:
    """The table as documentation."""
    rows = [f"| `{s.name}` | {s.unit} | {s.reducer} | {s.meaning} |" for s in METRICS.values()]
    return "\n".join(["| metric | unit | reducer | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _metrics(pairs: list[tuple[Tensor, Tensor | None]]) -> list[Metric]:
    if not pairs:
        return []
    import torch

    rows = []
    for values, where in pairs:
        x = values.detach().reshape(-1).double()
        total, low, high = x, x, x
        count = x.new_tensor(len(x))
        if where is not None:
            # Selection by `where`, not by indexing: indexing would wait for the device each time.
            counted = where.reshape(-1)
            count = counted.sum().double()
            total = torch.where(counted, x, 0.0)
            low, high = torch.where(counted, x, math.inf), torch.where(counted, x, -math.inf)
        if not len(x):  # the extremes of nothing
            low, high = x.new_tensor([math.inf]), x.new_tensor([-math.inf])
        rows.append(torch.stack([total.sum(), count, low.min(), high.max()]))
    return [
        Metric(sum=total, count=count, min=low, max=high)
        for total, count, low, high in torch.stack(rows).tolist()
    ]
