"""Verdicts on a step batch, each with its rule and the reason in words.

They read recorded metrics and nothing else, so the trainer and a report of an old run judge alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trueup.diagnostics.metrics import Metric


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


_NONE = Metric.of(0.0)


def health(
    metrics: Mapping[str, Metric],
    *,
    corrects: bool,
    n_changed: int | None = None,
    min_ess: float = 0.3,
    max_kl: float = 0.1,
    max_z: float = 4.0,
    max_missing: float = 0.01,
) -> tuple[Verdict, ...]:
    """Judge a step batch and what was applied to it.

    Args:
        metrics: Metrics of its correction.
        corrects: A correction is configured, so that weights of exactly 1 are suspect.
        n_changed: Elements that the newest update changed in the engine's dtype; None if there was
            no update, or none that was meant to change anything.
        min_ess: Least ESS ratio of the applied token weights.
        max_kl: Largest |k1| in nats.
        max_z: Largest |z| of the calibration test.
        max_missing: Largest share of action tokens without behaviour log-prob.

    Returns:
        All verdicts; those about tokens only if the step batch has any.
    """
    verdicts = list(_about_tokens(metrics, corrects, min_ess, max_kl, max_z, max_missing))
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


def _about_tokens(
    metrics: Mapping[str, Metric],
    corrects: bool,
    min_ess: float,
    max_kl: float,
    max_z: float,
    max_missing: float,
) -> tuple[Verdict, ...]:
    if "kept/tokens" not in metrics:  # every group was dropped: nothing was rejected
        return ()
    kept = metrics["kept/tokens"].sum
    applied, size = metrics.get("weight/applied", _NONE), metrics.get("gap/abs_log_ratio", _NONE)
    all_ones = applied.max == 1 and applied.sum == kept
    ess = metrics.get("ess/applied_tokens", _NONE).mean
    kl = -metrics.get("gap/log_ratio", _NONE).mean
    z = metrics.get("gap/calibration_z", _NONE).mean
    missing = metrics["excluded/missing_logp"].mean
    behaviour = metrics.get("gap/behaviour_logp", _NONE)
    which = "all 0 (probability 1)" if behaviour.max == 0 else "all equal"
    return (
        Verdict(
            name="something_kept",
            ok=kept > 0,
            value=kept,
            rule="> 0 kept tokens",
            message="everything rejected: no step can be taken",
        ),
        Verdict(
            name="effective_size",
            ok=ess >= min_ess,
            value=ess,
            rule=f">= {min_ess:g}",
            message="a few tokens carry the step: the policies are too far apart",
        ),
        Verdict(
            name="kl",
            ok=abs(kl) <= max_kl,
            value=kl,
            rule=f"|k1| <= {max_kl:g} nats",
            message="behaviour and target are far apart: lower staleness or learning rate",
        ),
        Verdict(
            name="calibration",
            ok=abs(z) <= max_z,
            value=z,
            rule=f"|z| <= {max_z:g}",
            message="the mean ratio is not 1: wrong temperature, a shift by one token, a wrong "
            "version label or truncated support; drift does not do this",
        ),
        Verdict(
            name="correction_active",
            ok=not (corrects and all_ones and size.max > 1e-6),
            value=size.max,
            rule="weights differ from 1 where ratios do",
            message="a correction is configured, ratios differ, and every applied weight is 1: "
            "it is never applied",
        ),
        Verdict(
            name="behaviour_varies",
            ok=behaviour.count < 2 or behaviour.min != behaviour.max,
            value=behaviour.max - behaviour.min,
            rule="> 0 spread of log μ",
            message=f"behaviour log-probs are {which}: a placeholder, not what was sampled",
        ),
        Verdict(
            name="missing_logp",
            ok=missing <= max_missing,
            value=missing,
            rule=f"<= {max_missing:g} of action tokens",
            message="the engine produced garbage: behaviour log-probs missing or not finite",
        ),
    )
