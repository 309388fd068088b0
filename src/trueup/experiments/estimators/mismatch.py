"""The one-step problem under every preset, for symmetric noise and for two kinds of staleness."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trueup.experiments.base import Tell
from trueup.experiments.estimators import published
from trueup.experiments.estimators.effort import Effort
from trueup.experiments.estimators.methods import OTHERS, PUBLISHED
from trueup.simulation.estimator import EstimateError, compare, divergence
from trueup.simulation.one_step import OneStep, flatter, less_trained

KINDS = {
    "sharpened": "μ is π at a higher temperature: π has sharpened since",
    "trained": "μ ∝ π·e^(−τ r): π has followed the natural gradient of the reward since",
}
"""Mismatch as an older version of the policy has it, by name."""

Rows = dict[str, dict[str, dict[str, float]]]
"""{method: {level of mismatch: figures}}."""


def noise(settings: list[published.Setting], effort: Effort, tell: Tell) -> Rows:
    """Every preset under symmetric noise on the sampler's logits.

    The published four have the samples that the source drew for each of them; all others those of
    the first.
    """
    rows: Rows = {}
    for setting in settings:
        key = str(setting.sigma)
        for name, method in PUBLISHED.items():
            draws = setting.draws[name]
            add(rows, key, compare([draws], setting.problem, {name: method}))
        first = setting.draws["none"][: effort.repeats]
        found = compare([first], setting.problem, OTHERS, batch_repeats=effort.batch_repeats)
        add(rows, key, found)
        tell(f"symmetric noise, σ {setting.sigma:g}")
    return rows


def stale(settings: list[published.Setting], effort: Effort, tell: Tell) -> dict[str, Rows]:
    """Every preset where the sampler is an older version, at the same KL(μ‖π) as the noise."""
    found: dict[str, Rows] = {kind: {} for kind in KINDS}
    for kind, key, problem in stale_problems(settings):
        generator = torch.Generator().manual_seed(published.SEED)
        draws = problem.draw(effort.repeats, published.SAMPLES, generator)
        methods = {**PUBLISHED, **OTHERS}
        errors = compare([draws], problem, methods, batch_repeats=effort.batch_repeats)
        add(found[kind], key, errors)
        tell(f"{kind}, KL {key}")
    return found


def stale_problems(settings: list[published.Setting]) -> Iterator[tuple[str, str, OneStep]]:
    """(kind, KL as printed, problem): target and reward as published, the sampler stale."""
    for kind in KINDS:
        for setting in settings:
            target, reward = setting.problem.target, setting.problem.reward
            kl = divergence(setting.problem.behaviour, target)
            behaviour = (
                flatter(target, kl) if kind == "sharpened" else less_trained(target, reward, kl)
            )
            problem = OneStep(target=target, behaviour=behaviour, reward=reward)
            yield kind, published.printed(kl), problem


def add(rows: Rows, key: str, errors: Mapping[str, EstimateError]) -> None:
    """Enter the figures of several methods at one level of mismatch."""
    for name, error in errors.items():
        rows.setdefault(name, {})[key] = error.as_json()


def divergences(settings: list[published.Setting]) -> dict[str, Any]:
    """{σ: KL(μ‖π)}."""
    return {str(s.sigma): divergence(s.problem.behaviour, s.problem.target) for s in settings}
