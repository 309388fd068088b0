"""The published table of the one-step problem, and ours on the same random numbers.

Source: the seed chapter's one-step simulation [agent-RL tutorial, §13.4]. A table cell is (squared
bias, variance), both relative to the squared norm of the true gradient, to three decimals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trueup.experiments.estimators.methods import PUBLISHED
from trueup.simulation.estimator import Draws
from trueup.simulation.one_step import OneStep, log_softmax

SEED, VOCABULARY, SAMPLES, REPEATS = 0, 100, 64, 4000
SIGMAS = (0.1, 0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True)
class Cell:
    """Figures as they are printed."""

    bias2: str
    variance: str


KL = {0.1: "0.008", 0.5: "0.033", 1.0: "0.161", 2.0: "0.425"}
"""KL(μ‖π) by σ."""

CELLS = {
    "none": {
        0.1: Cell("0.012", "0.166"),
        0.5: Cell("0.046", "0.166"),
        1.0: Cell("0.291", "0.117"),
        2.0: Cell("0.737", "0.043"),
    },
    "is": {
        0.1: Cell("0.000", "0.133"),
        0.5: Cell("0.000", "0.152"),
        1.0: Cell("0.000", "1.300"),
        2.0: Cell("0.005", "10.202"),
    },
    "tis": {
        0.1: Cell("0.000", "0.131"),
        0.5: Cell("0.001", "0.138"),
        1.0: Cell("0.265", "0.163"),
        2.0: Cell("0.741", "0.074"),
    },
    "mis": {
        0.1: Cell("0.000", "0.132"),
        0.5: Cell("0.002", "0.150"),
        1.0: Cell("0.368", "0.190"),
        2.0: Cell("0.819", "0.127"),
    },
}
"""By method, in the order in which the source samples for them, and σ."""


def printed(value: float) -> str:
    """A figure as the source prints it."""
    return f"{value:.3f}"


def differences(one_step: Mapping[str, Any], kl: Mapping[str, float]) -> list[str]:
    """Every printed figure that is not the source's, in words.

    Args:
        one_step: {method: {σ: {"bias2", "variance"}}}.
        kl: {σ: KL(μ‖π)}.
    """
    found = []
    for sigma in SIGMAS:
        pairs = [("KL", printed(kl[str(sigma)]), KL[sigma])]
        for name, cells in CELLS.items():
            ours = one_step[name][str(sigma)]
            pairs += [
                (f"{name}: bias²", printed(ours["bias2"]), cells[sigma].bias2),
                (f"{name}: variance", printed(ours["variance"]), cells[sigma].variance),
            ]
        found += [
            f"σ {sigma:g}, {what} {got}, source {want}" for what, got, want in pairs if got != want
        ]
    return found


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The problem at one σ, with the samples of each published column."""

    sigma: float
    problem: OneStep
    draws: dict[str, Draws]


def settings() -> Iterator[Setting]:
    """The problem at each σ, on the source's random numbers.

    One generator, in the source's order: logits, rewards, then per σ the noise and the samples of
    each column.
    """
    generator = torch.Generator().manual_seed(SEED)
    logits = 2.0 * torch.randn(VOCABULARY, generator=generator)
    reward = torch.randn(VOCABULARY, generator=generator)
    for sigma in SIGMAS:
        noise = sigma * torch.randn(VOCABULARY, generator=generator)
        problem = OneStep(
            target=log_softmax(logits), behaviour=log_softmax(logits + noise), reward=reward
        )
        draws = {name: problem.draw(REPEATS, SAMPLES, generator) for name in PUBLISHED}
        yield Setting(sigma=sigma, problem=problem, draws=draws)
