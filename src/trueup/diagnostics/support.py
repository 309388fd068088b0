"""What sampling settings alone put between behaviour and target.

Two settings make the behaviour another distribution than softmax(logits / T) of the target.
Log-probs from before the temperature are of no distribution that anything was sampled from: nothing
can be computed from them. Truncated support (top-p, top-k) renormalises on the kept tokens: then
log μ = log π − log S with the kept mass S, on an unchanged policy d = log S exactly, and E_μ[ρ] is
S. That part of the gap is neither staleness nor the engine's arithmetic.

Shapes: N action tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.diagnostics.numerics import safe_mean, to_host
from trueup.errors import DataError
from trueup.gap import PolicyGap


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """The gap of truncated sampling, and what else there is; 0 without tokens."""

    mass: float
    """Mean kept mass S, in (0, 1]."""
    log_mass: float
    """Mean log S in nats: the part of mean d that truncation explains."""
    rest: float
    """Mean d − log S in nats: staleness, cache and engine."""
    rest_abs: float
    """Mean |d − log S| in nats."""


def check_comparable(*, temperature: float, raw: bool) -> None:
    """Refuse behaviour log-probs of a distribution that was not sampled from.

    Args:
        temperature: T > 0 of the sampling.
        raw: The engine's log-probs are from before the temperature.

    Raises:
        DataError: They are raw and T is not 1.
    """
    if raw and temperature != 1:
        rule = "of the distribution sampled from (after the temperature)"
        raise DataError(
            field="logp_behaviour", rule=rule, value=f"raw log-probs at T = {temperature:g}"
        )


def support(gap: PolicyGap, log_mass: Tensor) -> Support:
    """Take the part of truncated support out of the gap.

    Args:
        gap: The step batch.
        log_mass: [N] log S of each action token, as the engine or the kept ids give it.

    Raises:
        DataError: The shape is not [N], or a kept mass is not in (0, 1].
    """
    if log_mass.shape != gap.logp_target.shape:
        rule = f"of shape [{gap.num_tokens}]"
        raise DataError(field="log_mass", rule=rule, value=tuple(log_mass.shape))
    if not bool((torch.isfinite(log_mass) & (log_mass <= 1e-6)).all()):
        raise DataError(field="log_mass", rule="finite and <= 0", value=float(log_mass.max()))
    of_support = log_mass[gap.valid].double()
    rest = gap.log_ratio[gap.valid].double() - of_support
    mass, mean, rest_mean, rest_abs = to_host(
        [safe_mean(x) for x in (of_support.exp(), of_support, rest, rest.abs())]
    )
    return Support(mass=mass, log_mass=mean, rest=rest_mean, rest_abs=rest_abs)
