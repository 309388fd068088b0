"""One token from a softmax over V, a fixed reward per token, and a sampler that is off.

The gradient of E_π[r] with respect to the logits is π ⊙ (r − E_π r). The behaviour policy differs
from the target by symmetric noise on its logits (another engine, another precision), or in a
direction, as an older version of the same policy does.

Shapes: V tokens, R repeats of N samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.errors import ConfigError
from trueup.simulation.estimator import Draws, divergence

_BISECTIONS = 60


@dataclass(frozen=True, kw_only=True)
class OneStep:
    """The problem: who samples, who learns, what is rewarded."""

    target: Tensor
    """[V] float32 log π."""
    behaviour: Tensor
    """[V] float32 log μ."""
    reward: Tensor
    """[V] float32."""

    @property
    def policy(self) -> Tensor:
        """[1, V] log π."""
        return self.target[None]

    @property
    def gradient(self) -> Tensor:
        """[1, V] π ⊙ (r − E_π r)."""
        pi = self.target.exp()
        return (pi * (self.reward - (pi * self.reward).sum()))[None]

    def draw(self, repeats: int, samples: int, generator: torch.Generator) -> Draws:
        """Sample R step batches of N one-token episodes from the behaviour policy."""
        probability = self.behaviour.exp().expand(repeats, -1)
        token = torch.multinomial(probability, samples, replacement=True, generator=generator)
        return Draws(
            context=torch.zeros_like(token)[..., None],
            token=token[..., None],
            target=self.target[token][..., None],
            behaviour=self.behaviour[token][..., None],
            reward=self.reward[token],
        )


def log_softmax(logits: Tensor) -> Tensor:
    """[..., V] log-probs of logits."""
    return torch.log_softmax(logits, -1)


def flatter(logits: Tensor, kl: float) -> Tensor:
    """Log-probs of a behaviour policy from before π sharpened: its logits times 1 − τ.

    Args:
        logits: [V] of the target.
        kl: KL(μ‖π) in nats that the result has.
    """
    return _at_divergence(logits, kl, lambda tau: logits * (1 - tau), stop=1.0)


def less_trained(logits: Tensor, reward: Tensor, kl: float) -> Tensor:
    """Log-probs of a behaviour policy from before π was trained: its logits less τ·reward.

    The path of natural policy gradient on E[r]: μ ∝ π·e^(−τ r).

    Args:
        logits: [V] of the target.
        reward: [V].
        kl: KL(μ‖π) in nats that the result has.
    """
    return _at_divergence(logits, kl, lambda tau: logits - tau * reward, stop=64.0)


def _at_divergence(
    logits: Tensor, kl: float, path: Callable[[float], Tensor], *, stop: float
) -> Tensor:
    """The point of a path on which KL(μ‖π) grows from 0, found by bisection."""
    target = log_softmax(logits)

    def reached(tau: float) -> bool:
        return divergence(log_softmax(path(tau)), target) >= kl

    if not reached(stop):
        most = divergence(log_softmax(path(stop)), target)
        raise ConfigError(field="kl", rule=f"<= {most:g} on this path", value=kl)
    low, high = 0.0, stop
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return log_softmax(path(high))
