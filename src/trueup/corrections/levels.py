"""Over what a ratio is taken: a token, or something longer whose log-ratios add up.

"Sequence" alone names no level: product and geometric mean are both called so in the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trueup.corrections.preset import Level
from trueup.gap import PolicyGap

if TYPE_CHECKING:
    from torch import Tensor


def token(gap: PolicyGap) -> Tensor:
    """d_t, each token for itself."""
    return gap.log_ratio


LEVELS: Mapping[str, Level] = {"token": token}
"""Every level by name. To add one: a function [N] log-ratios and a line here."""
