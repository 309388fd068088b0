"""What is computed from counts and log-probs, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

Draws = Sequence[tuple[int, float]]
"""Sampled first tokens of one prompt, with the log-prob that was returned for each."""


def table(draws: Draws) -> dict[int, float]:
    """Mean probability that was returned for each token."""
    said: dict[int, list[float]] = {}
    for token, logp in draws:
        said.setdefault(token, []).append(math.exp(logp))
    return {token: math.fsum(p) / len(p) for token, p in said.items()}


def surprise_z(prompts: Iterable[Draws]) -> float:
    """Are tokens as probable as their own log-probs say?

    Of each prompt one half of the draws fixes a set of tokens and, by what was returned for them,
    their probabilities; everything else counts as one more token. The improbability of the other
    half's draws then has a known mean and variance. No whole distribution is needed, and neither
    half has chosen what it is tested on.

    Returns:
        (Σ improbability − expected) / standard deviation, pooled over prompts and both halves; at
        most standard normal for an engine that samples from what it reports. Above 0: from
        something flatter.
    """
    excess = variance = 0.0
    for draws in prompts:
        middle = len(draws) // 2
        for known, tested in ((draws[:middle], draws[middle:]), (draws[middle:], draws[:middle])):
            probability = table(known)
            score = {token: -math.log(p) for token, p in probability.items() if p > 0}
            other = max(score.values(), default=0.0) + 1
            rest = max(1 - math.fsum(probability.values()), 0.0)
            mean = rest * other + math.fsum(probability[t] * x for t, x in score.items())
            square = rest * other**2 + math.fsum(probability[t] * x**2 for t, x in score.items())
            excess += math.fsum(score.get(token, other) - mean for token, _ in tested)
            variance += len(tested) * (square - mean**2)
    # Both halves use the same draws: their sum has at most twice the variance of independent terms.
    return excess / math.sqrt(2 * variance) if variance > 0 else 0.0


def slope(pairs: Iterable[tuple[Draws, Draws]]) -> tuple[float, float]:
    """Least-squares slope of log-probs under one setting on those under another.

    Args:
        pairs: Per prompt, draws under the one and the other; tokens that both have are compared,
            after their means over the prompt's tokens are taken off.

    Returns:
        Slope, and the Σ of squares in nats² that it rests on (0: it is not defined).
    """
    spread = product = 0.0
    for one, other in pairs:
        common = _common(one, other)
        for x, y in zip(
            _centred(a for a, _ in common), _centred(b for _, b in common), strict=True
        ):
            spread += x * x
            product += x * y
    return (product / spread if spread else 0.0), spread


def lifts(one: Draws, other: Draws) -> list[float]:
    """Log-prob under `other` less that under `one`, of every token that both have, in nats."""
    return [b - a for a, b in _common(one, other)]


def same_proportion(hits: int, of: int, other_hits: int, of_other: int) -> float:
    """Two-sided p-value of Fisher's exact test for equal proportions."""
    total, all_hits = of + of_other, hits + other_hits

    def chance(k: int) -> float:
        return math.comb(of, k) * math.comb(of_other, all_hits - k) / math.comb(total, all_hits)

    seen = chance(hits)
    ways = range(max(0, all_hits - of_other), min(of, all_hits) + 1)
    return min(1.0, math.fsum(p for k in ways if (p := chance(k)) <= seen * (1 + 1e-9)))


def _common(one: Draws, other: Draws) -> list[tuple[float, float]]:
    a, b = _logs(table(one)), _logs(table(other))
    return [(a[token], b[token]) for token in sorted(a.keys() & b.keys())]


def _logs(probabilities: Mapping[int, float]) -> dict[int, float]:
    return {token: math.log(p) for token, p in probabilities.items() if p > 0}


def _centred(values: Iterable[float]) -> list[float]:
    found = list(values)
    mean = math.fsum(found) / max(len(found), 1)
    return [value - mean for value in found]
