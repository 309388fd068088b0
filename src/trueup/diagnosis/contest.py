"""Which prediction of the log-probs is nearest to what the engine said, and by what margin.

Every hypothesis predicts the log-prob of every token. Between two of them, h and g, the slope of
y − q_h on q_g − q_h over tokens (y what the engine said) is 0 where h is true and 1 where g is: it
is the label test with any two causes in the place of two versions. Below ½ the tokens lie nearer to
h, and the distance from ½ in standard errors is the margin. So the nearest hypothesis beats every
other one, and one that it beats by less than a stated margin is not separable from it.

The engine's own arithmetic is the noise, and it repeats: the same prompt, or the same token, gets
about the same error again. So the standard error is the larger of those clustered by prompt and by
sampled token. A part of the error that is the same for all tokens may lie along a hypothesis by
chance; that moves a slope but only counts where it reaches ½.

Legend: H hypotheses, the first of them that nothing is wrong; N tokens, S completions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NAMING = 5.0
"""Standard errors by which a cause must beat the absence of any."""
SEPARATING = 3.0
"""Standard errors by which it must beat another cause."""
_SUSPICION = 1.0
"""Standard errors beyond ½ from which more tokens are worth asking for."""
_DULL = 0.25
"""Standard error of a slope above which further tokens would hardly decide anything."""
_ROUNDING = 1e-9
"""Change of a log-prob in nats that is none."""
EXCLUDING = 3.0
"""Standard errors beyond ½ at which a cause counts as excluded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The log-probs that a cause implies."""

    cause: str
    """Name in the library; empty: nothing is wrong."""
    detail: str = ""
    """Which of several of its kind."""
    logp: Tensor
    """[N] float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How one hypothesis fares."""

    cause: str
    detail: str
    rms: float
    """Root mean square of what it leaves unexplained, in nats."""
    effect: float
    """Root mean square of what it changes, over the tokens that it changes, in nats."""
    tokens: int
    """Tokens that it changes."""
    slope: float
    """Of y − clean on its change: 1 where it holds, 0 where nothing is wrong."""
    error: float
    """Standard error of `slope`; 0 where it changes nothing."""
    against_best: float
    """Margin by which the winner beats it, in standard errors; 0 for the winner itself."""

    @property
    def supported(self) -> bool:
        """It beats the absence of any cause."""
        return self.error > 0 and self.slope - 0.5 > NAMING * self.error

    @property
    def suspected(self) -> bool:
        """More tokens may support it."""
        lead = self.slope - 0.5
        return 0 < self.error < _DULL and _SUSPICION * self.error < lead <= NAMING * self.error

    @property
    def excluded(self) -> bool:
        """The absence of any cause beats it."""
        return self.error > 0 and 0.5 - self.slope > EXCLUDING * self.error


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """All hypotheses, the clean one first, then by what they leave unexplained."""

    standings: tuple[Standing, ...]
    index: int
    """Which of the predictions the winner is."""
    winner: Standing
    """The nearest one that beats the absence of any cause; that one if none does."""
    rivals: tuple[str, ...]
    """Causes that the winner does not beat clearly enough."""


def contest(
    said: Tensor, predictions: Sequence[Prediction], *, clusters: Sequence[Tensor], among: Tensor
) -> Contest:
    """Compare predictions.

    Args:
        said: [N] what the engine returned.
        predictions: [H] the first without a cause.
        clusters: Each [N] int64: tokens whose errors may be alike.
        among: [N] bool, tokens that take part; said and predicted log-probs are finite there.
    """
    y, alike = said[among], [cluster[among] for cluster in clusters]
    q = torch.stack([p.logp[among] for p in predictions])  # [H, N]
    q = torch.where((q - q[0]).abs() > _ROUNDING, q, q[0])
    residual = y - q
    moments = residual @ residual.T  # [H, H]
    clean = [slope(residual[0], q[h] - q[0], alike) for h in range(len(q))]
    squares = moments.diagonal()
    best = 0
    for h, (value, error) in enumerate(clean):
        if error > 0 and value - 0.5 > NAMING * error and squares[h] < squares[best]:
            best = h
    margins = [_margin(*slope(residual[best], q[h] - q[best], alike)) for h in range(len(q))]
    rows = []
    for h, prediction in enumerate(predictions):
        change = q[h] - q[0]
        changed = change != 0
        rows.append(
            Standing(
                cause=prediction.cause,
                detail=prediction.detail,
                rms=float((squares[h] / max(len(y), 1)).sqrt()),
                effect=float(change[changed].square().mean().sqrt()) if changed.any() else 0.0,
                tokens=int(changed.sum()),
                slope=clean[h][0],
                error=clean[h][1],
                against_best=0.0 if h == best else margins[h],
            )
        )
    winner = rows[best]
    rivals = sorted(
        {
            r.cause
            for r in rows
            if r.cause and r.cause != winner.cause and r.supported and r.against_best < SEPARATING
        }
    )
    ordered = [rows[0], *sorted(rows[1:], key=lambda r: r.rms)]
    return Contest(standings=tuple(ordered), index=best, winner=winner, rivals=tuple(rivals))


def slope(y: Tensor, x: Tensor, clusters: Sequence[Tensor]) -> tuple[float, float]:
    """Slope of y on x through the origin, and the largest of its clustered standard errors.

    Args:
        y: [n] float64.
        x: [n] float64.
        clusters: Each [n] int64: tokens whose errors may be alike.

    Returns:
        (0, 0) where x is 0; an infinite error where it is not in one cluster alone.
    """
    spread = float(x.square().sum())
    if not spread:
        return 0.0, 0.0
    found = float((x * y).sum()) / spread
    score = x * (y - found * x)
    return found, max(_error(score, x, cluster) for cluster in clusters) / spread


def _error(score: Tensor, x: Tensor, cluster: Tensor) -> float:
    sums = score.new_zeros(int(cluster.max()) + 1).index_add(0, cluster, score)
    used = int((torch.bincount(cluster[x != 0]) > 0).sum())
    if used < 2:
        return float("inf")
    # An exact fit is a finite certainty.
    return max(math.sqrt(float(sums.square().sum()) * used / (used - 1)), 1e-9)


def _margin(slope: float, error: float) -> float:
    return (0.5 - slope) / error if error else 0.0
