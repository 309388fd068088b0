"""What a correction decides, once per step batch, frozen before the first optimiser step.

The order within a step batch (one pass): ratio-only filters → group baselines without the rejected
→ advantages → signed filters and adaptive mixing → weights. Micro-batches and ranks see only the
result, so neither can change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trueup.diagnostics.metrics import Metric

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Advantages, weights, keep flags and the loss denominator of one step batch, all detached.

    The decoupled loss is −(1/Z) Σ_{kept t} w_t · min(r_t A_t, clip(r_t) A_t); selection is by
    `where`, never by multiplication. A trainer without weights takes
    `advantages * weight`.
    """

    advantages: Tensor
    """[N] float32: A of the token's episode, before weighting; 0 where it has no contrast."""
    weight: Tensor
    """[N] float32 ≥ 0, finite."""
    keep: Tensor
    """[N] bool: the token takes part in the loss."""
    counts: Tensor
    """[N] bool: the denominator counts the token."""
    denominator: float
    """Z > 0: action tokens of the step batch, all or kept; fixed for every micro-batch."""
    gates: Mapping[str, float]
    """By preset, the number that the step batch decides for it, whether or not it was applied."""
    metrics: Mapping[str, Metric]
    """Raw and applied statistics under the names of the metric table."""
