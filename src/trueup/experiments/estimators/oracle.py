"""The best mixing coefficient of each problem, and those that methods choose without knowing it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trueup.corrections.adaptive import adaptive
from trueup.corrections.preset import Constants
from trueup.corrections.table import find
from trueup.corrections.truncated import importance, truncated
from trueup.diagnostics.oracle import Moments, exact_moments, sample_moments
from trueup.experiments.base import Tell
from trueup.experiments.estimators import published
from trueup.experiments.estimators.effort import Effort
from trueup.experiments.estimators.mismatch import stale_problems
from trueup.simulation.estimator import Draws, Method, estimates
from trueup.simulation.one_step import OneStep

SAMPLES = published.SAMPLES


def oracle(settings: list[published.Setting], effort: Effort, tell: Tell) -> dict[str, Any]:
    """{kind: {level of mismatch: coefficients and their mean squared errors}}."""
    problems = [("noise", str(s.sigma), s.problem) for s in settings]
    found: dict[str, Any] = {}
    for kind, key, problem in [*problems, *stale_problems(settings)]:
        found.setdefault(kind, {})[key] = _compare(problem, effort)
        tell(f"oracle, {kind} {key}")
    return found


def per_outcome(problem: OneStep, *, cap: float) -> Moments:
    """Exact moments of the uncorrected and the truncated estimate, over all V outcomes.

    A mean of w·(r − r̄)·s over a step batch is the covariance of r and w·s there: what one sample
    adds to it is (1 − 1/N)·(r − E r)·(w·s − E[w·s]), with expectations of the behaviour policy,
    and not (r − E r)·w·s, whose variance is another.
    """
    pi, mu = problem.target.double().exp(), problem.behaviour.double().exp()
    advantage = (1 - 1 / SAMPLES) * (problem.reward - (mu * problem.reward).sum())[:, None]
    score = torch.eye(len(pi)) - pi
    weight = truncated(problem.target - problem.behaviour, cap=cap)[:, None]
    plain, weighted = (advantage * (x - (mu[:, None] * x).sum(0)) for x in (score, weight * score))
    return exact_moments(plain, weighted, mu, problem.gradient[0])


def measured(problem: OneStep, *, cap: float, repeats: int) -> Moments:
    """The same moments from the presets' own estimates of many step batches."""
    draws = problem.draw(repeats, SAMPLES, torch.Generator().manual_seed(published.SEED))
    plain, weighted = (
        estimates(draws, problem.policy, method).double().flatten(1)
        for method in (Method(preset=find("none")), Method(preset=find("tis"), params={"cap": cap}))
    )
    equally = torch.full((repeats,), 1 / repeats)
    found = exact_moments(plain, weighted, equally, problem.gradient.flatten())
    # Those are covariances of a mean over the samples of a step batch.
    return replace(
        found,
        plain=found.plain * SAMPLES,
        weighted=found.weighted * SAMPLES,
        cross=found.cross * SAMPLES,
    )


def _compare(problem: OneStep, effort: Effort) -> dict[str, Any]:
    constants = find("ais").resolve({})
    cap = constants["cap"]
    exact = per_outcome(problem, cap=cap)
    scale = float(problem.gradient.square().sum())
    alphas = {
        "oracle": exact.alpha(SAMPLES),
        "none": 0.0,
        "truncated": 1.0,
        "equation_25": exact.alpha_published,
        "equation_26": exact.alpha_simplified,
    }
    draws = problem.draw(
        effort.oracle_batches, SAMPLES, torch.Generator().manual_seed(published.SEED + 1)
    )
    gated = _gated(draws, constants)
    alphas["ais_mean"] = float(gated.mean())
    batches = [_estimated(problem, draws, i, cap) for i in range(len(draws))]
    fitted, plug_in = torch.tensor(batches, dtype=torch.float64).unbind(1)
    return {
        "alpha": alphas,
        "error": {name: exact.error(a, SAMPLES) / scale for name, a in alphas.items()},
        "measured_minimum": measured(problem, cap=cap, repeats=effort.oracle).alpha(SAMPLES),
        "ais": _spread(gated),
        "estimated": _spread(fitted),
        "estimated_without_cross_fit": _spread(plug_in),
    }


def _gated(draws: Draws, constants: Constants) -> Tensor:
    """[R] α that AIS gives each step batch."""
    advantage = draws.reward - draws.reward.mean(1, keepdim=True)
    repeat = torch.arange(len(draws)).repeat_interleave(draws.reward.shape[1])
    log_ratio = (draws.target - draws.behaviour).flatten()
    return adaptive(
        log_ratio,
        advantage.flatten(),
        cap=constants["cap"],
        delta=constants["delta"],
        gamma=constants["gamma"],
        beta=constants["beta"],
        part=repeat,
    ).alpha


def _estimated(problem: OneStep, draws: Draws, index: int, cap: float) -> tuple[float, float]:
    """α* from the per-sample gradients of one step batch, cross-fitted and not."""
    token, reward = draws.token[index, :, 0], draws.reward[index]
    log_ratio = (draws.target - draws.behaviour)[index, :, 0]
    score = torch.eye(len(problem.target))[token] - problem.target.exp()
    weights = (torch.ones_like(reward), truncated(log_ratio, cap=cap), importance(log_ratio))
    scores = [weight[:, None] * score for weight in weights]
    plain, weighted, unbiased = (
        (reward - reward.mean())[:, None] * (x - x.mean(0)) for x in scores
    )
    fitted, plug_in = (
        sample_moments(plain, weighted, unbiased, cross_fit=fit).alpha(len(token))
        for fit in (True, False)
    )
    return fitted, plug_in


def _spread(alpha: Tensor) -> dict[str, float]:
    return {"mean": float(alpha.mean()), "std": float(alpha.std())}
