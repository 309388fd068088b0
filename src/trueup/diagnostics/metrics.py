"""The one table of metrics, and the mergeable value each of them is stored as.

A metric is a sum, a count, a minimum and a maximum: partial values from shards or mini-batches
merge exactly, and a mean is never a mean of means. What no sum can express (an effective sample
size, a mixing coefficient) is a value of one whole step batch, and the table says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

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
    sketched: bool = False
    """Its distribution is recorded too, for quantiles (`sketch.QuantileSketch`)."""


_SPECS = (
    MetricSpec("gap/log_ratio", "nats", "mean", "d = log π_old − log μ; its mean is −k1"),
    MetricSpec("gap/abs_log_ratio", "nats", "mean", "|d|, the mismatch of one token", True),
    MetricSpec("gap/k2", "nats", "mean", "½d², second-order estimate of KL(μ‖π)"),
    MetricSpec("gap/k3", "nats", "mean", "ρ − 1 − d ≥ 0, low-variance estimate of KL(μ‖π)"),
    MetricSpec("gap/reverse_kl", "nats", "mean", "ρd − ρ + 1 ≥ 0, estimate of KL(π‖μ)"),
    MetricSpec("gap/chi_square", "1", "mean", "ρ² − 1; its mean is χ²(π‖μ) of one token"),
    MetricSpec(
        "gap/renyi_episodes", "nats", "batch", "log mean ρ² of the products over an episode"
    ),
    MetricSpec("gap/abs_episode_sum", "nats", "mean", "|Σ d| of an episode"),
    MetricSpec("gap/perplexity_ratio", "1", "mean", "e^(−mean d) of an episode: PPL(π) / PPL(μ)"),
    MetricSpec("gap/entropy", "nats", "mean", "−ρ·log π_old; its mean is the entropy of π_old"),
    MetricSpec("gap/probability", "1", "mean", "|π_old − μ| of the sampled token"),
    MetricSpec("gap/behaviour_logp", "nats", "mean", "log μ of the sampled token"),
    MetricSpec("gap/scored", "1", "mean", "share of action tokens scored under their own version"),
    MetricSpec("gap/staleness", "nats", "mean", "log π_old − log π_v of the scored tokens"),
    MetricSpec("gap/abs_staleness", "nats", "mean", "|log π_old − log π_v| of the scored tokens"),
    MetricSpec(
        "gap/abs_rescored",
        "nats",
        "mean",
        "|log μ_v' − log μ| of tokens whose cache a later version v' computed again: staleness in "
        "the engine's own arithmetic",
    ),
    MetricSpec(
        "gap/cache",
        "nats",
        "mean",
        "log π_v − log π_v^cache, where versions before wrote the cache",
    ),
    MetricSpec("gap/abs_cache", "nats", "mean", "|log π_v − log π_v^cache| of the scored tokens"),
    MetricSpec("gap/engine", "nats", "mean", "log π_v^cache − log μ of the scored tokens"),
    MetricSpec(
        "gap/abs_engine", "nats", "mean", "|log π_v^cache − log μ|: the floor of the engine"
    ),
    MetricSpec(
        "attribution/share_staleness", "1", "batch", "E[staleness·d] / E[d²] of the scored tokens"
    ),
    MetricSpec("attribution/share_cache", "1", "batch", "E[cache·d] / E[d²] of the scored tokens"),
    MetricSpec("attribution/share_engine", "1", "batch", "E[engine·d] / E[d²]: the rest of it"),
    MetricSpec(
        "attribution/scorer_variance",
        "nats²",
        "mean",
        "half the squared difference of two scores of one token by the same weights",
    ),
    MetricSpec("label/slope", "1", "batch", "0: version labels are true; 1: one version too new"),
    MetricSpec("label/se", "1", "batch", "standard error of the slope, clustered by episode"),
    MetricSpec(
        "probe/abs_gap", "nats", "mean", "|log π_v − log μ| of a token decoded right after a load"
    ),
    MetricSpec(
        "probe/excess", "1", "max", "mean |d| of a probe / the most that its engine's floor allows"
    ),
    MetricSpec(
        "probe/growth", "1", "max", "at lr 0: rise of the probes' mean |d| / the most it may be"
    ),
    MetricSpec("probe/unknown", "1", "mean", "share of a probe without log μ or known version"),
    MetricSpec("probe/cached", "1", "mean", "share of a second turn's context found in the cache"),
    MetricSpec(
        "grid/slope", "1", "batch", "0: a quantised engine does not compute on its grid; 1: it does"
    ),
    MetricSpec("grid/se", "1", "batch", "standard error of the slope, clustered by sequence"),
    MetricSpec(
        "grid/size", "1", "batch", "engine − trainer over grid − trainer, root mean squares"
    ),
    MetricSpec(
        "load/digest_differs", "1", "mean", "1: an engine attests another digest than was published"
    ),
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
    MetricSpec("kept/advantage_mass", "1", "mean", "share of Σ|A| in the loss (count: Σ|A|)"),
    MetricSpec("kept/positive_reward", "1", "mean", "share of tokens in the loss, reward > 0"),
    MetricSpec("kept/other_reward", "1", "mean", "share of tokens in the loss, reward ≤ 0"),
    MetricSpec(
        "kept/shortest_quarter", "1", "mean", "share of the shortest quarter of episodes in it"
    ),
    MetricSpec(
        "kept/longest_quarter", "1", "mean", "share of the longest quarter of episodes in it"
    ),
    MetricSpec("kept/episode_tokens", "tokens", "mean", "action tokens of an episode in the loss"),
    MetricSpec("kept/episode_reward", "1", "mean", "reward of an episode in the loss"),
    MetricSpec(
        "excluded/missing_logp", "1", "mean", "share of action tokens without a known log μ"
    ),
    MetricSpec(
        "excluded/missing_version", "1", "mean", "share of action tokens of an unknown version"
    ),
    MetricSpec("excluded/over_bound", "1", "mean", "share of action tokens beyond the lag bound"),
    MetricSpec("excluded/garbage_episodes", "episodes", "sum", "no log μ at all: rejected"),
    MetricSpec("excluded/empty_episodes", "episodes", "sum", "no action token: excluded"),
    MetricSpec("excluded/filtered_episodes", "episodes", "sum", "rejected whole by the filter"),
    MetricSpec("group/no_contrast", "groups", "sum", "all remaining rewards equal: no advantage"),
    MetricSpec("group/with_contrast", "groups", "sum", "groups that teach something"),
    MetricSpec("advantage/value", "1", "mean", "advantage of an episode in the loss, unweighted"),
    MetricSpec("advantage/amplification", "1", "batch", "std(A·w) / std(A), rejected tokens as 0"),
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
    MetricSpec(
        "update/learning_rate", "1", "mean", "learning rate of the step, with √(ESS/B) if asked for"
    ),
    MetricSpec("update/reference_kl", "nats", "mean", "k3 of KL(π_θ‖π_ref) of a token in the loss"),
    MetricSpec(
        "gate/error",
        "1",
        "mean",
        "|w − w′| of a token: gate of the previous step batch, and its own",
    ),
    MetricSpec("correction/off", "1", "mean", "1: nothing to correct above the engine's floor"),
    MetricSpec("update/clip_high", "1", "mean", "share of tokens with A > 0 clipped from above"),
    MetricSpec("update/clip_low", "1", "mean", "share of tokens with A < 0 clipped from below"),
    MetricSpec("health/something_kept", "1", "mean", "1 where the verdict failed: nothing kept"),
    MetricSpec("health/effective_size", "1", "mean", "1: too few tokens carry the step"),
    MetricSpec("health/kl", "1", "mean", "1: behaviour and target are far apart"),
    MetricSpec("health/calibration", "1", "mean", "1: the mean ratio is not 1"),
    MetricSpec("health/correction_active", "1", "mean", "1: a correction that is never applied"),
    MetricSpec("health/behaviour_varies", "1", "mean", "1: log μ all 0 or all equal"),
    MetricSpec("health/missing_logp", "1", "mean", "1: log-probs missing"),
    MetricSpec("health/missing_version", "1", "mean", "1: tokens of an unknown version"),
    MetricSpec("health/over_cap", "1", "mean", "1: many ratios above the cap"),
    MetricSpec("health/length_bias", "1", "mean", "1: long episodes are rejected for their length"),
    MetricSpec("health/floor", "1", "mean", "1: the engine is further off than its precision"),
    MetricSpec("health/labels", "1", "mean", "1: tokens of another version than their label"),
    MetricSpec("health/update_visible", "1", "mean", "1: no weight changed in the engine's dtype"),
    MetricSpec("health/digest", "1", "mean", "1: an engine holds other weights than published"),
    MetricSpec("health/probe", "1", "mean", "1: a load leaves the engine above its floor"),
    MetricSpec("health/probe_known", "1", "mean", "1: a probe of no version there is, or no log μ"),
    MetricSpec("health/probe_growth", "1", "mean", "1: at lr 0 probes drift from the trainer"),
    MetricSpec("health/grid", "1", "mean", "1: a quantisation that does nothing"),
    MetricSpec("health/stationary", "1", "mean", "1: the mismatch grows although nothing learns"),
)

METRICS: Mapping[str, MetricSpec] = {spec.name: spec for spec in _SPECS}
"""Every metric by name. To add one: a line in `_SPECS`, and the place that computes it."""


Values: TypeAlias = "Tensor | tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]"
"""What a metric is of: values; with the bool mask of what counts; with how much each counts."""


def metric_of(values: Tensor, where: Tensor | None = None) -> Metric:
    """Statistic of the selected values; the neutral element of `merge` when there are none."""
    return _metrics([(values, where)])[0]


def metrics_of(values: Mapping[str, Values]) -> dict[str, Metric]:
    """Statistics of many tensors with a single transfer to the host.

    Args:
        values: By metric name. With weights ω ≥ 0, sum and count are Σ ωx and Σ ω.

    Returns:
        A metric per name; a metric without values is left out.
    """
    found = zip(values, _metrics(list(values.values())), strict=True)
    return {name: metric for name, metric in found if metric.count}


def as_markdown() -> str:
    """The table as documentation."""
    rows = [f"| `{s.name}` | {s.unit} | {s.reducer} | {s.meaning} |" for s in METRICS.values()]
    return "\n".join(
        [_PAGE, "| metric | unit | reducer | meaning |", "|---|---|---|---|", *rows, ""]
    )


_PAGE = """\
# Metrics

Every number that a training step records, by its one name. This page is generated from
`trueup.diagnostics.metrics.METRICS`: `python -m trueup.diagnostics.metrics > docs/metrics.md`.

d = log π_old − log μ, ρ = e^d, A the advantage, w the applied weight. A metric is stored as a sum,
a count and two extremes, so that shards merge exactly; the reducer says which of them is the figure
(`batch`: a value of one whole step batch, which shards do not add up to). What is of tokens is of
action tokens with a known log μ, unless it counts those without.
"""


def _metrics(columns: list[Values]) -> list[Metric]:
    if not columns:
        return []
    import torch

    rows = []
    for column in columns:
        values, where, *weights = column if isinstance(column, tuple) else (column, None)
        x = values.detach().reshape(-1)
        x = x if x.is_floating_point() else x.double()
        counted = None if where is None else where.reshape(-1)
        if counted is not None and x.device.type == "cpu" and bool(counted.all()):
            counted = None  # cheap to know where there is no device to wait for
        total = low = high = x
        if counted is not None:
            # Selection by `where`, not by indexing: indexing would wait for the device each time.
            total = torch.where(counted, x, 0.0)
            low, high = torch.where(counted, x, math.inf), torch.where(counted, x, -math.inf)
        count = (
            torch.tensor(len(x), device=x.device) if counted is None else counted.count_nonzero()
        )
        if weights:
            weight = weights[0].detach().reshape(-1).double()
            weight = weight if counted is None else torch.where(counted, weight, 0.0)
            total, count = total * weight, weight.sum()
        if not len(x):  # the extremes of nothing
            low, high = x.new_tensor([math.inf]), x.new_tensor([-math.inf])
        parts = (total.sum(dtype=torch.float64), count, low.min(), high.max())
        rows.append(torch.stack([part.double() for part in parts]))
    return [
        Metric(sum=total, count=count, min=low, max=high)
        for total, count, low, high in torch.stack(rows).tolist()
    ]


if __name__ == "__main__":
    import sys

    sys.stdout.write(as_markdown())
