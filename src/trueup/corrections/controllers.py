"""What a step batch decides about the step as a whole, beside the weights of its tokens.

- **ESS-scaled learning rate** [VCPO, 2602.17616]: lr · √(ESS/B). A step whose weights rest on few
  episodes is a noisy step, and the noise of a mean falls with the square root of its sample.
- **Off at the floor**: a batch that is fresh, and whose gap is no larger than what the engine's
  arithmetic alone makes, has nothing to correct; weights that differ from 1 would be noise.
- **Bypass** needs filters without weights: the clipped ratio is π_θ/μ already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from trueup.corrections.preset import Preset
from trueup.corrections.truncated import uncorrected_weights
from trueup.diagnostics.metrics import Metric
from trueup.gap import PolicyGap


def learning_rate_factor(metrics: Mapping[str, Metric]) -> float:
    """√(ESS/B) of the applied weights over episodes, in [0, 1]; 1 without episodes.

    An episode counts once, with the product of its token weights; a rejected one counts as 0.

    Args:
        metrics: Of the step batch's correction.
    """
    found = metrics.get("ess/applied_episodes")
    return math.sqrt(found.mean) if found is not None else 1.0


def at_floor(gap: PolicyGap, *, floor: float) -> bool:
    """Whether every token is fresh and their mean |d| is within the floor.

    Args:
        gap: The step batch.
        floor: Mean |d| in nats of freshly sampled tokens under this engine and precision; 0 is
            reached by equal log-probs only.
    """
    if not bool(gap.valid.any()) or bool((gap.lag > 0).any()):
        return False
    return float(gap.log_ratio[gap.valid].double().abs().mean()) <= floor


def without_weights(preset: Preset) -> Preset:
    """The filters of a preset, and w = 1."""
    return replace(preset, weight=uncorrected_weights, bounds=lambda constants: (1.0, 1.0))
