"""Over what a ratio is taken: a token, or something longer whose log-ratios add up.

"Sequence" alone names no level: product and geometric mean are both called so in the field.

Shapes: N action tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trueup.gap import PolicyGap

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of a ratio. To add one: a constant in this module."""

    name: str
    whole_episode: bool
    """All tokens of an episode share the ratio: what a filter rejects, it rejects whole."""
    log_ratio: Callable[[PolicyGap], Tensor]
    """[N] float32 log-ratio, given to each token that shares it; 0 where log μ is missing."""


TOKEN = Level(name="token", whole_episode=False, log_ratio=lambda gap: gap.log_ratio)
"""d_t, each token for itself."""
