"""verl's rollout correction: the same call, the same names, our arithmetic.

    from verl.trainer.ppo import rollout_corr_helper
    from trueup.integrations import verl
    verl.install(rollout_corr_helper)

`rollout_is` and `rollout_rs` name presets of our table (its aliases are verl's names). What differs
is listed in docs/bridges.md; first of all, that a bound `low_high` of a k1 option is a bound on the
ratio π/μ, where verl bounds its inverse.

Shapes: B rows, T positions. Signatures are those of verl 0.9.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from trueup.corrections.method import Filters
from trueup.corrections.preset import Constants
from trueup.corrections.table import find_filter
from trueup.errors import ConfigError, DataError
from trueup.integrations.figures import figures
from trueup.integrations.padded import Applied, apply
from trueup.integrations.verl_metrics import verl_metrics

Threshold = str | float
"""A number, or `low_high`."""

_OTHER_WEIGHTS = {
    "weight/applied": "rollout_is_mean",
    "ess/applied_tokens": "rollout_is_eff_sample_size",
}
"""Our figure -> verl's of the same meaning, for weights that are not min(ρ, cap) of a token."""


def correct_rollout(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: Threshold | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: Threshold | None = None,
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """Weights and the response mask without what is rejected.

    Args:
        old_log_prob: [B, T] float32 log π_old; anything outside the mask.
        rollout_log_prob: [B, T] float32 log μ; anything outside the mask, NaN where missing.
        response_mask: [B, T], 1 at action tokens.
        rollout_is: `token` or `sequence`; None: no weights.
        rollout_is_threshold: A cap, or `low_high`: weights outside become 0, the mask stays.
        rollout_is_batch_normalize: Divide the weights by their mean over the tokens.
        rollout_rs: Comma-separated options that reject tokens or rows; None: none.
        rollout_rs_threshold: One threshold for all options, or comma-separated one for each:
            `low_high` or the upper one of two reciprocal bounds for k1, a limit for k2 and k3.

    Returns:
        [B, T] weights, detached, 0 outside the mask, or None; [B, T] mask in the dtype it came in;
        metrics as `rollout_corr/<verl's name>` and `trueup/<ours>`.

    Raises:
        ConfigError: An option or a threshold is unknown or out of range.
        DataError: Shapes or values are wrong, or there is no action token.
    """
    if not bool(response_mask.any()):
        raise DataError(field="response_mask", rule="1 for at least one token", value="all 0")
    preset, params = weighting(rollout_is, rollout_is_threshold)
    filters = rejection(rollout_rs, rollout_rs_threshold)

    # Twice, because verl's loss multiplies the two: weights are for all tokens, whatever the mask
    # loses, and a weight of 0 leaves the mask as it is.
    decide = partial(
        apply,
        torch.zeros(len(response_mask), device=response_mask.device),
        target=old_log_prob,
        behaviour=rollout_log_prob,
        mask=response_mask,
    )
    weighed = decide(preset=preset, params=params, normalize=rollout_is_batch_normalize)
    screened = decide(preset="none", filters=filters)
    mask = torch.where(screened.keep, response_mask, torch.zeros_like(response_mask))
    figures_of_verl = _verls(
        weighed, preset=preset, params=params, filters=filters, raw=not rollout_is_batch_normalize
    )
    kept = {name: x for name, x in figures(screened.metrics).items() if name.startswith("kept/")}
    if filters:
        figures_of_verl["rollout_corr/rollout_rs_masked_fraction"] = 1 - kept["kept/tokens"]
    ours = {f"trueup/{name}": x for name, x in (figures(weighed.metrics) | kept).items()}
    return None if rollout_is is None else weighed.weight, mask, figures_of_verl | ours


def weighting(
    rollout_is: str | None, threshold: Threshold | None
) -> tuple[str, Mapping[str, float]]:
    """The preset of `rollout_is`, and its constants.

    Raises:
        ConfigError: Neither `token`, `sequence` nor None, or the threshold is not a number.
    """
    if rollout_is is None or threshold is None:
        return "none", {}
    capped, banded = {"token": ("tis", "mis"), "sequence": ("seq-tis", "seq-mis")}.get(
        rollout_is, ("", "")
    )
    if not capped:
        rule = "'token', 'sequence' or None"
        raise ConfigError(field="rollout_is", rule=rule, value=rollout_is)
    bounds = _numbers(threshold, field="rollout_is_threshold")
    if len(bounds) == 1:
        return capped, {"cap": bounds[0]}
    return banded, dict(zip(("low", "high"), bounds, strict=True))


def rejection(rollout_rs: str | None, threshold: Threshold | None) -> dict[str, dict[str, float]]:
    """The filters of `rollout_rs`, with their constants.

    Raises:
        ConfigError: An option is unknown, or thresholds do not fit the options.
    """
    options = list(dict.fromkeys(x.strip() for x in (rollout_rs or "").split(",") if x.strip()))
    if not options:
        return {}
    if threshold is None:
        raise ConfigError(field="rollout_rs_threshold", rule="given with rollout_rs", value=None)
    given = [x.strip() for x in str(threshold).split(",") if x.strip()]
    if len(given) == 1:
        given *= len(options)
    if len(given) != len(options):
        rule = f"1 or {len(options)} values for {', '.join(options)}"
        raise ConfigError(field="rollout_rs_threshold", rule=rule, value=threshold)
    return {option: _limits(option, value) for option, value in zip(options, given, strict=True)}


def _limits(option: str, threshold: str) -> dict[str, float]:
    constants = find_filter(option).constants
    bounds = _numbers(threshold, field="rollout_rs_threshold")
    if set(constants) == {"low", "high"}:
        low, high = bounds if len(bounds) == 2 else (1 / bounds[0], bounds[0])
        return {"low": low, "high": high}
    if len(bounds) != 1:
        rule = f"one upper limit for {option}"
        raise ConfigError(field="rollout_rs_threshold", rule=rule, value=threshold)
    return {"limit": bounds[0]}


def _numbers(threshold: Threshold, *, field: str) -> list[float]:
    try:
        found = [float(part) for part in str(threshold).split("_")]
    except ValueError as cause:
        raise ConfigError(field=field, rule="a number or 'low_high'", value=threshold) from cause
    if len(found) > 2 or not all(0 < x < float("inf") for x in found):
        raise ConfigError(field=field, rule="positive: a number or 'low_high'", value=threshold)
    return found


def _verls(
    weighed: Applied, *, preset: str, params: Constants, filters: Filters, raw: bool
) -> dict[str, float]:
    """Verl's figures, as far as they are defined for these knobs."""
    band = filters["seq_mean_k1"] if tuple(filters) == ("seq_mean_k1",) else None
    found = verl_metrics(
        weighed.gap,
        cap=params.get("cap", math.inf),
        band=(band["low"], band["high"]) if band else None,
    )
    if preset == "tis" and raw:
        return found
    found = {name: x for name, x in found.items() if "/rollout_is_" not in name}
    own = figures(weighed.metrics) if preset != "none" else {}
    return found | {
        f"rollout_corr/{name}": own[ours] for ours, name in _OTHER_WEIGHTS.items() if ours in own
    }


def compute_rollout_correction_and_rejection_mask(
    *args: Any, **kwargs: Any
) -> tuple[Any, Tensor, dict[str, float]]:
    """`correct_rollout` as verl calls it: weights come in a `DataProto`, or None.

    Raises:
        ConfigError: As `correct_rollout`.
        DataError: As `correct_rollout`.
    """
    from verl.protocol import DataProto

    weights, mask, metrics = correct_rollout(*args, **kwargs)
    wrapped = None if weights is None else DataProto.from_dict({"rollout_is_weights": weights})
    return wrapped, mask, metrics


def install(helper: ModuleType) -> None:
    """Let `verl.trainer.ppo.rollout_corr_helper` call ours; its callers are unchanged.

    Raises:
        ConfigError: The module has no such function: another version of verl.
    """
    name = compute_rollout_correction_and_rejection_mask.__name__
    if not hasattr(helper, name):
        raise ConfigError(field=helper.__name__, rule=f"a module with {name}", value="none")
    setattr(helper, name, compute_rollout_correction_and_rejection_mask)
