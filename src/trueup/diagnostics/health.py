"""Verdicts on a step batch, each with its number, its rule and the reason in words.

They read recorded metrics and nothing else, so the trainer and a report of an old run judge alike.
`stationary` alone needs the steps before as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trueup.diagnostics import grid
from trueup.diagnostics.labels import CERTAINTY, MAX_ERROR, TOLERANCE, labels_refuted
from trueup.diagnostics.metrics import Metric
from trueup.diagnostics.trend import trend


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One judgement."""

    name: str
    ok: bool
    value: float
    rule: str
    """What `value` must satisfy."""
    message: str
    """What it means when it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where a verdict turns."""

    ess: float = 0.3
    """Least ESS ratio of the applied token weights."""
    kl: float = 0.1
    """Largest |k1| in nats."""
    z: float = 4.0
    """Largest |z| of the calibration test and of the trend of a mismatch that should not move."""
    missing: float = 0.01
    """Largest share of action tokens without behaviour log-prob."""
    over_cap: float = 0.05
    """Largest share of ratios above the cap."""
    length_ratio: float = 0.8
    """Least kept share of the longest quarter of episodes, relative to the shortest quarter."""


LIMITS = Limits()

FLOORS: Mapping[str, float] = {
    "float32": 0.01,
    "bfloat16": 0.1,
    **dict.fromkeys(("fp8", "fp8_row", "fp8_block", "mxfp8", "fp8_weight", "fp8_cast_all"), 0.5),
    "int8": 0.5,
    "int8_weight": 0.25,
    **dict.fromkeys(("fp4", "int4"), 2.5),
}
"""Largest mean |engine part| in nats that a precision explains: about 2.5 times what sound engines
show (bfloat16 .03-.04; dynamic FP8 and INT8 .2; INT8 weights .08; INT4 1.1; float32 below .004)."""


def ceiling(precision: str) -> float | None:
    """The floor of an arithmetic such as `bfloat16+int8`: of its coarsest part; None if unknown."""
    return max((FLOORS[part] for part in precision.split("+") if part in FLOORS), default=None)


_NONE = Metric.of(0.0)
_LEAST_SERIES = 5
"""Steps before a trend is judged."""


def health(
    metrics: Mapping[str, Metric],
    *,
    corrects: bool,
    n_changed: int | None = None,
    precision: str | None = None,
    limits: Limits = LIMITS,
) -> tuple[Verdict, ...]:
    """Judge a step batch and what was applied to it.

    Args:
        metrics: Metrics of its correction, and of its attribution and label test if there are any.
        corrects: A correction is configured, so that weights of exactly 1 are suspect.
        n_changed: Elements that the newest update changed in the engine's dtype; None if there was
            no update, or none that was meant to change anything.
        precision: What engine and trainer compute in (`ceiling`); None: the floor is not judged.
        limits: Where verdicts turn.

    Returns:
        All verdicts for which something was recorded.
    """
    verdicts: list[Verdict] = []
    if "kept/tokens" in metrics:  # else every group was dropped: nothing was rejected
        verdicts += _distance(metrics, limits)
        verdicts += _correction(metrics, corrects, limits)
    if "excluded/missing_logp" in metrics:
        verdicts += _provenance(metrics, limits)
    if "gap/abs_engine" in metrics and precision is not None:
        verdicts += _floor(metrics["gap/abs_engine"].mean, precision)
    if "label/slope" in metrics and "label/se" in metrics:
        verdicts.append(_labels(metrics["label/slope"].mean, metrics["label/se"].mean))
    verdicts += loads(metrics)
    if n_changed is not None:
        verdicts.append(
            Verdict(
                name="update_visible",
                ok=n_changed > 0,
                value=n_changed,
                rule="> 0 changed elements",
                message="hidden update: no weight changed in the engine's dtype, "
                "the learning rate is too small for it",
            )
        )
    return tuple(verdicts)


def loads(metrics: Mapping[str, Metric]) -> tuple[Verdict, ...]:
    """Judge what engines loaded since the step before, and the probes of it.

    Args:
        metrics: `load/…` and `probe/…`, of one load or of several.
    """
    rules = (
        (
            "digest",
            "load/digest_differs",
            0.0,
            "0 of the loads",
            "an engine attests other weights than were published: an update that never arrived, or "
            "arrived in part",
        ),
        (
            "probe",
            "probe/excess",
            1.0,
            "<= 1, mean |d| of a probe over the most that floor and precision allow",
            "right after a load the engine is further from the trainer than when it was fresh: a "
            "stale copy of a tensor (a tied LM head that was not repacked), a prefix cache that "
            "outlived its weights, an update that arrived in part; from the first load on: "
            "log-probs of another temperature, or a coarser arithmetic than claimed",
        ),
        (
            "probe_growth",
            "probe/growth",
            1.0,
            "<= 1, rise of the probes' mean |d| over the most that chance explains",
            "nothing is learned and probes drift from the trainer: stale cache or sync bug",
        ),
        (
            "probe_known",
            "probe/unknown",
            0.0,
            "0 of a probe's tokens",
            "probe tokens without a log-prob, or of a version that the trainer has not produced: "
            "the engine's labels are not true",
        ),
    )
    verdicts = [
        Verdict(name=name, ok=found.max <= most, value=found.max, rule=rule, message=message)
        for name, key, most, rule, message in rules
        if (found := metrics.get(key)) is not None
    ]
    if "grid/slope" in metrics:
        verdicts.append(_grid(*(metrics[f"grid/{part}"].mean for part in ("slope", "se", "size"))))
    return tuple(verdicts)


def _grid(slope: float, error: float, size: float) -> Verdict:
    return Verdict(
        name="grid",
        ok=not grid.grid_refuted(slope, error, size),
        value=slope,
        rule=f"a slope of {grid.LEAST_SLOPE:g} within {grid.CERTAINTY:g} standard errors (of "
        f"{error:.2g}), or an engine term of {grid.LEAST_SIZE:g} of the grid's (is {size:.2g})",
        message="a quantisation that does nothing: the engine's log-probs know nothing of the grid "
        "that it claims",
    )


def stationary(series: Sequence[Metric], *, limits: Limits = LIMITS) -> Verdict:
    """Judge the mismatch of steps in which nothing was learned (learning rate 0).

    The weights are the same at every step, so whatever grows is the engine's: keys and values of an
    old version, a sync that half happened. The trend is the slope of mean |d| over steps, tested
    against the scatter of the steps about it.

    Args:
        series: `gap/abs_log_ratio` of each step, in order.
        limits: Where the verdict turns.
    """
    means = [metric.mean for metric in series if metric.count]
    slope, error = trend(means) if len(means) >= _LEAST_SERIES else (0.0, 0.0)
    z = slope / max(error, 1e-12)
    level = sum(means) / len(means) if means else 0.0
    rise = slope * (len(means) - 1)
    return Verdict(
        name="stationary",
        ok=not (z > limits.z and rise > max(1e-5, 0.1 * level)),
        value=rise,
        rule=f"a rise of mean |d| <= 10 % of its level, or within {limits.z:g} standard errors",
        message="nothing is learned and the mismatch grows: stale cache or sync bug",
    )


def _distance(metrics: Mapping[str, Metric], limits: Limits) -> Iterator[Verdict]:
    kl = -metrics.get("gap/log_ratio", _NONE).mean
    yield Verdict(
        name="kl",
        ok=abs(kl) <= limits.kl,
        value=kl,
        rule=f"|k1| <= {limits.kl:g} nats",
        message="behaviour and target are far apart: lower staleness or learning rate",
    )
    z = metrics.get("gap/calibration_z", _NONE).mean
    yield Verdict(
        name="calibration",
        ok=abs(z) <= limits.z,
        value=z,
        rule=f"|z| <= {limits.z:g}",
        message="the mean ratio is not 1: wrong temperature, a shift by one token, a wrong "
        "version label or truncated support; below 0 also a target that prefers what was hardly "
        "sampled, after many updates",
    )


def _correction(metrics: Mapping[str, Metric], corrects: bool, limits: Limits) -> Iterator[Verdict]:
    kept = metrics["kept/tokens"].sum
    yield Verdict(
        name="something_kept",
        ok=kept > 0,
        value=kept,
        rule="> 0 kept tokens",
        message="everything rejected: no step can be taken",
    )
    ess = metrics.get("ess/applied_tokens", _NONE).mean
    yield Verdict(
        name="effective_size",
        ok=ess >= limits.ess,
        value=ess,
        rule=f">= {limits.ess:g}",
        message="a few tokens carry the step: the policies are too far apart",
    )
    applied, size = metrics.get("weight/applied", _NONE), metrics.get("gap/abs_log_ratio", _NONE)
    all_ones = applied.max == 1 and applied.sum == kept
    yield Verdict(
        name="correction_active",
        ok=not (corrects and all_ones and size.max > 1e-6),
        value=size.max,
        rule="weights differ from 1 where ratios do",
        message="a correction is configured, ratios differ, and every applied weight is 1: "
        "it is never applied",
    )
    if "weight/over_cap" in metrics:
        share = metrics["weight/over_cap"].mean
        yield Verdict(
            name="over_cap",
            ok=share <= limits.over_cap,
            value=share,
            rule=f"<= {limits.over_cap:g} of the ratios above the cap",
            message="the cap decides instead of the ratio: bias where it bounds; lower "
            "staleness or a larger cap help",
        )
    short, long = metrics.get("kept/shortest_quarter"), metrics.get("kept/longest_quarter")
    if short is not None and long is not None and short.sum:
        ratio = long.mean / short.mean
        yield Verdict(
            name="length_bias",
            ok=not (ratio < limits.length_ratio and _differ(short, long) > limits.z),
            value=ratio,
            rule=f">= {limits.length_ratio:g}, kept share of long episodes / that of short ones",
            message="long episodes are rejected for being long, as products of ratios over an "
            "episode do: use the geometric mean or token level",
        )


def _differ(left: Metric, right: Metric) -> float:
    """Difference of two shares in standard errors."""
    share = (left.sum + right.sum) / (left.count + right.count)
    error = math.sqrt(share * (1 - share) * (1 / left.count + 1 / right.count))
    return (left.mean - right.mean) / error if error else 0.0


def _provenance(metrics: Mapping[str, Metric], limits: Limits) -> Iterator[Verdict]:
    behaviour = metrics.get("gap/behaviour_logp", _NONE)
    which = "all 0 (probability 1)" if behaviour.max == 0 else "all equal"
    yield Verdict(
        name="behaviour_varies",
        ok=behaviour.count < 2 or behaviour.min != behaviour.max,
        value=behaviour.max - behaviour.min,
        rule="> 0 spread of log μ",
        message=f"behaviour log-probs are {which}: a placeholder, not what was sampled",
    )
    missing = metrics["excluded/missing_logp"].mean
    yield Verdict(
        name="missing_logp",
        ok=missing <= limits.missing,
        value=missing,
        rule=f"<= {limits.missing:g} of action tokens",
        message="the engine produced garbage: behaviour log-probs missing or not finite",
    )
    unknown = metrics.get("excluded/missing_version", _NONE).mean
    yield Verdict(
        name="missing_version",
        ok=unknown == 0,
        value=unknown,
        rule="0 of action tokens",
        message="tokens whose version nobody knows: their lag and their gap cannot be told apart",
    )


def _floor(size: float, precision: str) -> Iterator[Verdict]:
    most = ceiling(precision)
    if most is not None:
        yield Verdict(
            name="floor",
            ok=size <= most,
            value=size,
            rule=f"<= {most:g} nats for {precision}",
            message="the engine is further from the trainer than its precision explains: another "
            "temperature, kernel, cache or version than claimed",
        )


def _labels(slope: float, error: float) -> Verdict:
    decided = 0 < error <= MAX_ERROR
    return Verdict(
        name="labels",
        ok=not (decided and labels_refuted(slope, error)),
        value=slope,
        rule=f"|slope| <= {TOLERANCE:g} or {CERTAINTY:g} standard errors (of {error:.2g})",
        message="version labels are not true: what the engine served follows the version before",
    )
