"""Bias and variance of a correction on a problem whose gradient is known exactly.

One *estimate* is what a step batch yields: N episodes of one task, their advantages against the
mean reward, and the weights and keep flags of a preset, as training would get them from
`corrections.compose.correct`. Many estimates, against the exact gradient, give squared bias and
variance.

The repeats are packed into one policy gap, each a group of its own, so that baselines, filters and
weights of token-, sequence- and group-scoped presets are those of the repeat alone. A batch-scoped
preset sees the whole gap, and therefore gets one gap per repeat.

Shapes: R repeats, N episodes each, T tokens each; C contexts, V tokens to choose from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from trueup.corrections.compose import apply
from trueup.corrections.preset import Preset
from trueup.corrections.table import PRESETS
from trueup.gap import PolicyGap

TURN_TOKENS = 10
"""Tokens of a turn, for presets at the level of turns."""

MAX_TOKENS = 1 << 20
"""Tokens of one gap: more only costs memory."""


class Problem(Protocol):
    """A softmax policy over V tokens in each of C contexts."""

    @property
    def policy(self) -> Tensor:
        """[C, V] float32 log π, what the trainer holds."""
        ...

    @property
    def gradient(self) -> Tensor:
        """[C, V] exact gradient of the expected reward with respect to the logits of π."""
        ...


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Episodes sampled by the behaviour policy, for several estimates."""

    context: Tensor
    """[R, N, T] int64."""
    token: Tensor
    """[R, N, T] int64."""
    target: Tensor
    """[R, N, T] float32 log π of the token."""
    behaviour: Tensor
    """[R, N, T] float32 log μ of the token."""
    reward: Tensor
    """[R, N] float32."""

    def __getitem__(self, repeats: slice) -> Draws:
        """Some of the repeats."""
        return Draws(
            context=self.context[repeats],
            token=self.token[repeats],
            target=self.target[repeats],
            behaviour=self.behaviour[repeats],
            reward=self.reward[repeats],
        )

    def __len__(self) -> int:
        """R."""
        return len(self.reward)


@dataclass(frozen=True, kw_only=True)
class Method:
    """A preset with overrides of its constants."""

    preset: Preset
    params: Mapping[str, float] = field(default_factory=dict)


METHODS: Mapping[str, Method] = {name: Method(preset=preset) for name, preset in PRESETS.items()}
"""Every preset of the table with its own constants."""


@dataclass(frozen=True, kw_only=True)
class EstimateError:
    """How far estimates are from the exact gradient g, relative to ‖g‖²."""

    bias2: float
    """‖mean − g‖² / ‖g‖² over R repeats; its expectation is `noise` above the true one."""
    variance: float
    """Trace of the covariance of one estimate / ‖g‖² (ddof 1)."""
    repeats: int

    @property
    def noise(self) -> float:
        """What the mean of R estimates has of `bias2` without any bias: variance / R."""
        return self.variance / self.repeats

    @property
    def mean_squared(self) -> float:
        """Squared bias + variance."""
        return self.bias2 + self.variance

    def as_json(self) -> dict[str, float]:
        """For `result.json`."""
        return {"bias2": self.bias2, "variance": self.variance, "repeats": self.repeats}


def error_of(estimates: Tensor, gradient: Tensor) -> EstimateError:
    """Squared bias and variance of estimates.

    Args:
        estimates: [R, C, V], R ≥ 2.
        gradient: [C, V] exact.
    """
    scale = gradient.square().sum()
    return EstimateError(
        bias2=float((estimates.mean(0) - gradient).square().sum() / scale),
        variance=float(estimates.var(0).sum() / scale),
        repeats=len(estimates),
    )


def compare(
    chunks: Iterable[Draws],
    problem: Problem,
    methods: Mapping[str, Method],
    *,
    batch_repeats: int | None = None,
) -> dict[str, EstimateError]:
    """Errors of several methods on the same episodes.

    Args:
        chunks: The repeats, in pieces that fit into memory.
        problem: What was sampled from.
        methods: What to compare, by name.
        batch_repeats: Batch-scoped methods, which take a gap per repeat, see the first so many
            repeats; all of them when None.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in methods}
    done = 0
    for draws in chunks:
        for name, method in methods.items():
            limited = method.preset.scope == "batch" and batch_repeats is not None
            part = draws[: max(0, (batch_repeats or 0) - done)] if limited else draws
            if len(part):
                found[name].append(estimates(part, problem.policy, method))
        done += len(draws)
    return {name: error_of(torch.cat(parts), problem.gradient) for name, parts in found.items()}


def estimates(draws: Draws, policy: Tensor, method: Method) -> Tensor:
    """The gradient estimate of each repeat: (1/N) Σ w·A·∇ log π over its kept tokens.

    ∇ log π(v | c) is onehot(v) − π(· | c) at context c, so that two sums per repeat are enough: of
    w·A by token and by context.

    Returns:
        [R, C, V] float32.
    """
    num_contexts, num_tokens = policy.shape
    value = coefficients(draws, method).flatten(1)  # [R, N·T]
    cell = (draws.context * num_tokens + draws.token).flatten(1)
    hits = value.new_zeros(len(draws), num_contexts * num_tokens).scatter_add(1, cell, value)
    hits = hits.view(-1, num_contexts, num_tokens)
    return (hits - hits.sum(-1, keepdim=True) * policy.exp()) / draws.reward.shape[1]


def coefficients(draws: Draws, method: Method) -> Tensor:
    """[R, N, T] float32 w·A of every token under a method; 0 where it was rejected."""
    per_repeat = draws.token[0].numel()
    size = 1 if method.preset.scope == "batch" else max(1, MAX_TOKENS // per_repeat)
    parts = []
    for start in range(0, len(draws), size):
        part = draws[start : start + size]
        made = apply(
            gap_of(part),
            method.preset,
            params=method.params,
            advantage="group",
            zero_variance="keep",
            denominator="all",
            max_lag=None,
        )
        parts.append(torch.where(made.keep, made.weight * made.advantages, 0.0))
    return torch.cat(parts).view_as(draws.target)


def gap_of(draws: Draws) -> PolicyGap:
    """The repeats as one packed gap: an episode per sample, a group per repeat."""
    repeats, samples, length = draws.token.shape
    episodes, tokens = repeats * samples, draws.token.numel()
    zeros = torch.zeros(tokens, dtype=torch.int64)
    return PolicyGap(
        logp_target=draws.target.flatten(),
        logp_behaviour=draws.behaviour.flatten(),
        segment_offsets=torch.arange(0, tokens + 1, length),
        segment_episode=torch.arange(episodes),
        group=torch.arange(repeats).repeat_interleave(samples),
        reward=draws.reward.flatten(),
        version=zeros,
        lag=zeros,
        engine=zeros,
        turn=(torch.arange(length) // TURN_TOKENS).repeat(episodes),
    )


def divergence(behaviour: Tensor, target: Tensor) -> float:
    """KL(μ‖π) in nats of two rows of log-probs, [V] each."""
    return float((behaviour.exp() * (behaviour - target)).sum())


def chunk_sizes(repeats: int, tokens_per_repeat: int) -> Sequence[int]:
    """Repeats in pieces of at most `MAX_TOKENS` tokens (and at least one repeat)."""
    size = max(1, MAX_TOKENS // tokens_per_repeat)
    return [min(size, repeats - start) for start in range(0, repeats, size)]
