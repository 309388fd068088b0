"""Peers behind the signature of the cases: each is asked in its own words, and answers as it does.

Shapes: B rows, T positions.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch
from peers import trl, verl

from trueup.testing.protocol import Arrays, Method, NotExpressible, Outcome, Run

NO_CAP = 1e9
"""A cap that caps nothing: log-ratios are clamped to ±20 by verl, and e^20 is 4.9e8."""
NO_FLOOR = 1e-12
"""The lower bound given to a peer that must have one, where a case has none."""


def _only_arrays(arrays: Arrays, run: Run) -> None:
    """Refuse what a function of log-probs and a mask cannot be told."""
    if run.raw_logprobs or run.temperature != 1:
        raise NotExpressible("knows no sampling settings")
    if not run.chosen:
        raise NotExpressible("is not called unless it is configured")
    if arrays.log_mass is not None:
        raise NotExpressible("knows no kept mass")


class Verl:
    """verl's `compute_rollout_correction_and_rejection_mask`."""

    def __init__(self, environment: Path) -> None:
        """Load the helper of an environment that has verl."""
        self.helper: ModuleType = verl.load(environment)

    def __call__(self, arrays: Arrays, method: Method, run: Run) -> Outcome:
        """Call it with thresholds in ratio space, as its documentation writes them."""
        _only_arrays(arrays, run)
        low = method.low or NO_FLOOR
        band = f"{low!r}_{method.high!r}"
        options = {
            ("token", "one"): {},
            ("token", "ratio"): {"rollout_is": "token", "rollout_is_threshold": NO_CAP},
            ("token", "truncate"): {"rollout_is": "token", "rollout_is_threshold": method.high},
            ("token", "band"): {
                "rollout_is": "token",
                "rollout_is_threshold": band,
                "rollout_rs": "token_k1",
                "rollout_rs_threshold": band,
            },
            ("product", "ratio"): {"rollout_is": "sequence", "rollout_is_threshold": NO_CAP},
            ("product", "truncate"): {
                "rollout_is": "sequence",
                "rollout_is_threshold": method.high,
            },
            ("product", "band"): {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": band},
            ("geometric", "band"): {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": band},
        }.get((method.level, method.weight))
        if options is None:
            raise NotExpressible(f"has no {method.weight} weight at level {method.level}")
        proto, mask, found = self.helper.compute_rollout_correction_and_rejection_mask(
            old_log_prob=arrays.target,
            rollout_log_prob=arrays.behaviour,
            response_mask=arrays.action.float(),
            **options,
        )
        figures = {name.partition("/")[2]: value for name, value in found.items()}
        names = {
            "weight_mean": "rollout_is_mean",
            "weight_min": "rollout_is_min",
            "weight_max": "rollout_is_max",
            "weight_std": "rollout_is_std",
            "over_high": "rollout_is_ratio_fraction_high",
            "ess_rows" if method.level == "product" else "ess_tokens": "rollout_is_eff_sample_size",
            "kl": "kl",
        }
        metrics = {ours: figures[theirs] for ours, theirs in names.items() if theirs in figures}
        if "rollout_rs_masked_fraction" in figures:
            metrics["kept"] = 1 - figures["rollout_rs_masked_fraction"]
        return Outcome(
            weight=None if proto is None else proto.batch["rollout_is_weights"],
            keep=mask.bool(),
            metrics=metrics | {f"verl/{name}": value for name, value in figures.items()},
        )


def trl_formula(arrays: Arrays, method: Method, run: Run) -> Outcome:
    """TRL's importance-sampling expression."""
    _only_arrays(arrays, run)
    if method.level == "geometric" or method.weight == "one":
        raise NotExpressible(f"has no {method.weight} weight at level {method.level}")
    if method.weight == "band" and method.low:
        raise NotExpressible("has no lower bound")
    level = "token" if method.level == "token" else "sequence"
    what = "mask" if method.weight == "band" else "truncate"
    ratio, found = trl.importance_weights(
        arrays.target,
        arrays.behaviour,
        arrays.action,
        mode=f"{level}_{what}",  # type: ignore[arg-type]
        cap=NO_CAP if method.weight == "ratio" else method.high,
    )
    weight = ratio.expand(arrays.action.shape)
    keep = arrays.action & (weight != 0)
    return Outcome(
        weight=weight,
        keep=keep,
        metrics={
            "raw_log_max": found["sampling_logp_difference/max"],
            "weight_min": found["importance_sampling_ratio/min"],
            "weight_mean": found["importance_sampling_ratio/mean"],
            "weight_max": found["importance_sampling_ratio/max"],
            "kept": float(torch.where(arrays.action, keep, False).sum() / arrays.action.sum()),
        },
    )
