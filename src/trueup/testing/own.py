"""trueup's own correction behind the signature of the cases."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, TypeAlias

from trueup.config import CorrectionConfig
from trueup.corrections.compose import correct
from trueup.diagnostics.health import health
from trueup.diagnostics.metrics import Metric, metric_of
from trueup.diagnostics.sketch import QuantileSketch
from trueup.diagnostics.support import check_comparable, support
from trueup.gap import PolicyGap
from trueup.integrations.padded import Layout, pack
from trueup.testing.protocol import Arrays, Method, NotExpressible, Outcome, Run

if TYPE_CHECKING:
    from torch import Tensor

Figures: TypeAlias = dict[str, float]

_PRESETS = {
    ("token", "one"): "none",
    ("token", "ratio"): "is",
    ("token", "truncate"): "tis",
    ("token", "band"): "mis",
    ("product", "ratio"): "seq-is",
    ("product", "truncate"): "seq-tis",
    ("product", "band"): "seq-mis",
    ("geometric", "band"): "geo",
}
"""(level, weight) of a method -> name in the table of presets."""

_ALARMS = {
    "something_kept": "everything_rejected",
    "correction_active": "never_applied",
    "missing_logp": "missing_logprobs",
}
"""Failed health verdict -> alarm of the cases."""


class Trueup:
    """`compose.correct` and the health verdicts, from padded arrays."""

    def __call__(self, arrays: Arrays, method: Method, run: Run) -> Outcome:
        """Decide weights, keep flags and advantages of a step batch."""
        check_comparable(temperature=run.temperature, raw=run.raw_logprobs)
        layout = Layout.of(arrays.action)
        gap = pack(
            layout,
            target=arrays.target,
            behaviour=arrays.behaviour,
            reward=arrays.reward,
            group=arrays.group,
        )
        log_mass = arrays.log_mass
        if log_mass is not None:
            log_mass = layout.pack(log_mass, field="log_mass")
        preset, params = _choice(method) if run.chosen else (CorrectionConfig().preset, {})
        made = correct(
            gap,
            preset=preset,
            params=params,
            advantage="group",
            denominator=method.denominator,
        )
        failed = {v.name for v in health(made.metrics, corrects=run.corrects) if not v.ok}
        metrics = {
            **made.metrics,
            "weight_kept": metric_of(made.weight, made.keep),
            "weight_square": metric_of(made.weight.double().square(), made.keep),
        }
        return Outcome(
            weight=layout.unpack(made.weight),
            keep=layout.unpack(made.keep, fill=False),
            advantage=layout.unpack(made.advantages),
            denominator=made.denominator,
            metrics=_mergeable(metrics) | _of_batch(gap, made.metrics, log_mass),
            alarms=tuple(alarm for name, alarm in _ALARMS.items() if name in failed),
            detail=metrics,
        )

    def merge(self, outcomes: Sequence[Outcome]) -> Mapping[str, float]:
        """Metrics of all batches as if they had been one."""
        return _mergeable(reduce(_merged, (_detail(outcome) for outcome in outcomes)))


correction = Trueup()
"""`pytest --trueup-correction trueup.testing.own:correction`."""


def _choice(method: Method) -> tuple[str, Figures]:
    """The preset of a method and its constants.

    Raises:
        NotExpressible: There is none.
    """
    name = _PRESETS.get((method.level, method.weight))
    if name is None:
        raise NotExpressible(f"no {method.weight} weight at level {method.level}")
    bounds = {
        "truncate": {"cap": method.high},
        "band": {"low": method.low, "high": method.high},
    }
    return name, bounds.get(method.weight, {})


def _mergeable(metrics: Mapping[str, Metric]) -> Figures:
    """Figures that sums, counts and extremes give, by the names of the cases."""
    empty = Metric(sum=0.0, count=0.0, min=0.0, max=0.0)
    found: Figures = {}
    kept, applied = metrics["weight_kept"], metrics.get("weight/applied", empty)
    if kept.count:
        spread = metrics["weight_square"].mean - kept.mean**2
        found |= {"weight_mean": kept.mean, "weight_min": kept.min}
        found |= {"weight_max": applied.max, "weight_std": max(spread, 0.0) ** 0.5}
    if "weight/raw" in metrics:
        d = metrics["gap/log_ratio"]
        found["raw_max"] = metrics["weight/raw"].max
        found["raw_log_max"] = max(d.max, -d.min)
        found["kl"] = -d.mean
    if "weight/over_cap" in metrics:
        found["over_high"] = metrics["weight/over_cap"].mean
    found["kept"] = metrics.get("kept/tokens", Metric.of(0.0)).mean
    found["missing"] = metrics.get("excluded/missing_logp", empty).sum
    found["rows_without_action"] = metrics.get("excluded/empty_episodes", empty).sum
    return found


def _of_batch(gap: PolicyGap, made: Mapping[str, Metric], log_mass: Tensor | None) -> Figures:
    """Figures of one whole batch, which parts do not add up to."""
    found: Figures = {}
    if bool(gap.valid.any()):
        sketch = QuantileSketch.of(gap.log_ratio[gap.valid].abs())
        found = {"median": sketch.quantile(0.5), "p99": sketch.quantile(0.99)}
    for name, ours in (("ess_tokens", "ess/applied_tokens"), ("ess_rows", "ess/applied_episodes")):
        if ours in made:
            found[name] = made[ours].mean
    if log_mass is not None:
        parts = support(gap, log_mass)
        found |= {"support": parts.mass, "rest_abs": parts.rest_abs}
    return found


def _detail(outcome: Outcome) -> dict[str, Metric]:
    assert isinstance(outcome.detail, dict)
    return outcome.detail


def _merged(left: Mapping[str, Metric], right: Mapping[str, Metric]) -> dict[str, Metric]:
    empty = Metric(sum=0.0, count=0.0, min=math.inf, max=-math.inf)
    return {name: left.get(name, empty).merge(right.get(name, empty)) for name in {**left, **right}}
