"""Runs the lab: the published table first, then what it leaves open."""

from __future__ import annotations

from typing import Any

import torch

from trueup.experiments.base import Outcome, Tell
from trueup.experiments.estimators import chains, mismatch, oracle, published, show
from trueup.experiments.estimators.effort import FULL, QUICK


def run(quick: bool, tell: Tell) -> Outcome:
    """The estimator table and its extensions.

    Args:
        quick: Fewer repeats of everything but the published part.
        tell: Called after each part.
    """
    effort = QUICK if quick else FULL
    torch.set_num_threads(1)  # the pieces are small, and one thread adds in one order
    settings = list(published.settings())
    result: dict[str, Any] = {
        "samples": published.SAMPLES,
        "kl": mismatch.divergences(settings),
        "one_step": mismatch.noise(settings, effort, tell),
        "stale": mismatch.stale(settings, effort, tell),
        "chain": chains.chain(effort, tell),
        "chain_exact": chains.exact(effort),
        "oracle": oracle.oracle(settings, effort, tell),
    }
    return Outcome(
        result=result,
        differences=published.differences(result["one_step"], result["kl"]),
        tables=show.tables(result),
        figures=show.figures(result),
    )
