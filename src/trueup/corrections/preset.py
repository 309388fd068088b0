"""What a correction preset is made of.

A published method is a choice of level, filter and weight with its constants: data, not code. Each
part is a pure function of `Ratios`; `compose.apply` runs the parts in their one order.

Shapes: N action tokens, E episodes.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from trueup.corrections.levels import Level
from trueup.errors import ConfigError
from trueup.gap import PolicyGap

if TYPE_CHECKING:
    from torch import Tensor

Scope = Literal["token", "sequence", "group", "batch"]
"""Whose log-probs must be known before a token's term of the loss is: its own, its episode's, its
group's, or the step batch's. A filter that rejects whole episodes has scope `group`, because the
rejected leave the baseline of the others."""

Constants = Mapping[str, float]
"""Resolved constants of a preset by name."""


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """What filters and weights see, all detached."""

    gap: PolicyGap
    """The two policies that are compared."""
    log_ratio: Tensor
    """[N] log-ratio at the level of the part that reads it, the same for all tokens that share it;
    0 where the behaviour log-prob is missing."""
    keep: Tensor
    """[N] bool: not excluded or rejected so far. Nothing else may enter a statistic."""
    advantage: Tensor
    """[N] float32 advantage of the token's episode; 0 for ratio-only filters, which come before."""
    gate: Tensor | None = None
    """[] float64: the number that a `gated` method decides, where it is decided already."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Outcome of a weight function."""

    weight: Tensor
    """[N] ≥ 0, finite everywhere; what is not kept is zeroed later."""
    factors: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars worth recording, by metric name."""
    gate: Tensor | None = None
    """[] float64: the number that these tokens decide, for a method that is `gated` by one."""


WeightFunction = Callable[[Ratios, Constants], Weights]


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Rejects tokens, or whole episodes where its level is one of whole episodes."""

    level: Level
    keep: Callable[[Ratios, Constants], Tensor]
    """[N] bool."""
    gate: Callable[[Ratios, Constants], Tensor] | None = None
    """The number that the step batch decides, which `keep` then finds in its ratios."""
    signed: bool = False
    """Reads the sign of the advantage, and therefore comes after the baselines. An unsigned filter
    of whole episodes takes what it rejects out of its group's baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A number of a method that a user may override."""

    default: float
    meaning: str
    low: float = 0.0
    """Least allowed value."""
    open_low: bool = False
    """The least value itself is not allowed."""
    high: float = math.inf
    """Largest allowed value."""
    usual: str = ""
    """Values in use elsewhere."""

    @property
    def allowed(self) -> str:
        """The range in words."""
        rule = f"{'>' if self.open_low else '>='} {self.low:g}"
        return rule if math.isinf(self.high) else f"{rule}, <= {self.high:g}"


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One method as data."""

    name: str
    level: Level
    """Of the ratio that the weight is made from."""
    scope: Scope
    weight: WeightFunction
    bounds: Callable[[Constants], tuple[float, float]]
    """Least and largest weight of a kept token."""
    constants: Mapping[str, Constant] = field(default_factory=dict)
    upper: str = ""
    """Constant above which a raw ratio counts as over the cap; empty: no cap."""
    filter: Filter | None = None
    gated: bool = False
    """Of scope `batch`, but for one number: given that, it has scope `token`."""
    moving: bool = False
    """Its source takes the ratio of the moving π_θ; as a correction it is taken once, at π_old."""
    formula: str
    meaning: str
    use: str
    """When to choose it."""
    source: str

    def resolve(self, params: Mapping[str, float], *, key: str = "correction.params") -> Constants:
        """Constants with overrides.

        Args:
            params: Overrides by name.
            key: Where in the configuration they are.

        Raises:
            ConfigError: A constant is unknown or out of range.
        """
        for name in params:
            if name not in self.constants:
                raise unknown(f"{key}.{name}", name, list(self.constants))
        resolved = {name: item.default for name, item in self.constants.items()} | dict(params)
        for name, item in self.constants.items():
            value = resolved[name]
            above = value > item.low if item.open_low else value >= item.low
            if not above or not value <= item.high:
                rule = f"<= {item.high:g}" if above else item.allowed.partition(",")[0]
                raise ConfigError(field=f"{key}.{name}", rule=rule, value=value)
        return resolved


def unknown(field: str, name: str, known: Sequence[str]) -> ConfigError:
    """The error for a name that is not in a table, with the nearest one that is."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    choice = f"one of {', '.join(known)}" if known else "absent: there are no constants"
    message = f"{field} must be {choice}, got {name!r}{hint}"
    return ConfigError(message, field=field, rule=choice, value=name)
