"""What a correction preset is made of.

A published method is a choice of level, filter and weight with its constants: data, not code. Each
part is a pure function of `Ratios`; `compose.apply` runs the parts in their one order.

Shapes: N action tokens, E episodes.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from trueup.corrections.levels import Level
from trueup.errors import ConfigError
from trueup.gap import PolicyGap

Scope = Literal["token", "sequence", "group", "batch"]
"""What must be known before a weight is: its token, its episode, its group, or the step batch."""

Constants = Mapping[str, float]
"""Resolved constants of a preset by name."""


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """What filters and weights see, all detached."""

    gap: PolicyGap
    log_ratio: Tensor
    """[N] float32 log-ratio at the preset's level, the same for all tokens that share it; 0 where
    the behaviour log-prob is missing."""
    keep: Tensor
    """[N] bool: not excluded or rejected so far. Nothing else may enter a statistic."""
    advantage: Tensor
    """[N] float32 advantage of the token's episode; 0 for ratio-only filters, which come before."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Outcome of a weight function."""

    weight: Tensor
    """[N] float32 ≥ 0, finite everywhere; what is not kept is zeroed later."""
    factors: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars worth recording, by metric name."""


Filter = Callable[[Ratios, Constants], Tensor]
"""[N] bool: keep."""
WeightFunction = Callable[[Ratios, Constants], Weights]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A number of a method that a user may override."""

    default: float
    meaning: str
    low: float = 0.0
    """Least allowed value."""
    open_low: bool = False
    """The least value itself is not allowed."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One method as data."""

    name: str
    level: Level
    scope: Scope
    weight: WeightFunction
    constants: Mapping[str, Constant] = field(default_factory=dict)
    ascending: tuple[str, ...] = ()
    """Constants that must not decrease in this order."""
    upper: str = ""
    """Constant above which a raw ratio counts as over the cap; empty: no cap."""
    ratio_filter: Filter | None = None
    """Rejects by ratio alone, before the baselines. What it rejects at a level of whole episodes
    leaves its group's baseline; a rejected token never does."""
    signed_filter: Filter | None = None
    """Rejects by ratio and sign of the advantage, after the baselines."""
    formula: str
    meaning: str
    source: str

    def resolve(self, params: Mapping[str, float]) -> dict[str, float]:
        """Constants with overrides.

        Raises:
            ConfigError: A constant is unknown, out of range or out of order.
        """
        for name in params:
            if name not in self.constants:
                raise unknown(f"correction.params.{name}", name, list(self.constants))
        resolved = {name: item.default for name, item in self.constants.items()} | dict(params)
        for name, item in self.constants.items():
            value = resolved[name]
            if not (value > item.low if item.open_low else value >= item.low):
                rule = f"{'>' if item.open_low else '>='} {item.low:g}"
                raise ConfigError(field=f"correction.params.{name}", rule=rule, value=value)
        for low, high in zip(self.ascending, self.ascending[1:], strict=False):
            if resolved[low] > resolved[high]:
                raise ConfigError(
                    field=f"correction.params.{low}",
                    rule=f"<= {high} ({resolved[high]:g})",
                    value=resolved[low],
                )
        return resolved


def unknown(field: str, name: str, known: list[str]) -> ConfigError:
    """The error for a name that is not in a table, with the nearest one that is."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    choice = f"one of {', '.join(known)}" if known else "absent: there are no constants"
    message = f"{field} must be {choice}, got {name!r}{hint}"
    return ConfigError(message, field=field, rule=choice, value=name)
