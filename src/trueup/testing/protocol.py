"""What a correction under test is given and what it may hand back.

    def correction(arrays: Arrays, method: Method, run: Run) -> Outcome

Arrays are padded; `Arrays.packed` is the same without padding. A field of the outcome that an
implementation does not have stays None, and a method or setting it does not have raises
`NotExpressible`: such a case is reported as not expressible, which is neither a pass nor a failure.
An object whose call has that signature will do; one with a method

    def merge(self, outcomes: Sequence[Outcome]) -> Mapping[str, float]

is also asked for the metrics of several mini-batches together.

Shapes: B rows, T positions, N action tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


class NotExpressible(Exception):
    """The implementation has no such method, setting or result."""


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """A step batch as padded arrays; one row is one episode."""

    target: Tensor
    """[B, T] log π_old: the trainer at the start of the update."""
    behaviour: Tensor
    """[B, T] log μ: what sampled; NaN where the engine returned none."""
    action: Tensor
    """[B, T] bool: sampled by the policy; everything else is prompt, tool output or padding."""
    reward: Tensor
    """[B] float32."""
    group: Tensor
    """[B] int64: equal for rows of one task."""
    current: Tensor | None = None
    """[B, T] log π_θ: the policy being updated, after some optimiser steps."""
    log_mass: Tensor | None = None
    """[B, T] log of the mass of the tokens that truncated sampling (top-p, top-k) could draw."""

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Target [N], behaviour [N] and row [N] of the action tokens, in order of rows."""
        row = self.action.nonzero()[:, 0]
        return self.target[self.action], self.behaviour[self.action], row


@dataclass(frozen=True, kw_only=True)
class Method:
    """The correction that is asked for."""

    level: Literal["token", "product", "geometric"] = "token"
    """Whose ratio: a token's, the product over a row, or its geometric mean."""
    weight: Literal["one", "ratio", "truncate", "band"] = "truncate"
    """1; ρ; min(ρ, high); or rejection of what is outside [low, high]."""
    low: float = 0.0
    """Least ratio kept by `band`, inclusive."""
    high: float = 2.0
    """Cap of `truncate`; largest ratio kept by `band`, inclusive."""
    denominator: Literal["all", "kept"] = "all"
    """Action tokens that the loss is divided by."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The settings of the run around the correction."""

    corrects: bool = True
    """A correction is configured; `Method.weight` says what is really applied."""
    chosen: bool = True
    """The method has been chosen by the user; otherwise nothing was said."""
    asynchronous: bool = False
    temperature: float = 1.0
    raw_logprobs: bool = False
    """The engine's log-probs are from before the temperature."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a correction decided; None where an implementation has no such result."""

    weight: Tensor | None = None
    """[B, T] or broadcastable: the factor on the loss of each token; any value where rejected."""
    keep: Tensor | None = None
    """[B, T] bool: in the loss."""
    advantage: Tensor | None = None
    """[B, T]: before weighting."""
    denominator: float | None = None
    """What the sum of the loss is divided by."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """By the names of `METRICS`, those that exist."""
    alarms: tuple[str, ...] | None = None
    """Names of `ALARMS` raised; None if the implementation judges nothing."""
    detail: object = None
    """Whatever `merge` needs."""


METRICS: Mapping[str, str] = {
    "weight_mean": "mean applied weight of the kept action tokens",
    "weight_min": "least applied weight of a kept action token",
    "weight_max": "largest applied weight",
    "weight_std": "standard deviation of the applied weights",
    "raw_max": "largest ratio before cap and filter",
    "raw_log_max": "largest |log-ratio| before any clamp",
    "over_high": "share of action tokens whose raw ratio exceeds `high`",
    "kept": "share of action tokens in the loss",
    "ess_tokens": "ESS ratio over action tokens, rejected ones with weight 0",
    "ess_rows": "ESS ratio over rows, one weight per row",
    "kl": "−mean d",
    "rows_without_action": "rows without action token that were left out",
    "missing": "action tokens without log μ that were left out",
    "support": "mean kept mass of truncated sampling",
    "rest_abs": "mean |d| of what truncated sampling does not explain",
    "median": "median |d|",
    "p99": "99th percentile of |d|",
}
"""Names that cases ask for, and what they mean."""

ALARMS: Mapping[str, str] = {
    "everything_rejected": "no token is in the loss",
    "never_applied": "a correction is configured, ratios differ, and every weight is 1",
    "missing_logprobs": "log μ is missing or not finite for too many action tokens",
}
"""Judgements that cases ask for."""


class CorrectionFunction(Protocol):
    """Anything that corrects."""

    def __call__(self, arrays: Arrays, method: Method, run: Run) -> Outcome:
        """Decide weights, keep flags and advantages of a step batch."""
        ...


@runtime_checkable
class Merging(Protocol):
    """A correction whose metrics of several batches can be put together."""

    def merge(self, outcomes: Sequence[Outcome]) -> Mapping[str, float]:
        """Metrics of all batches as if they had been one."""
        ...
