"""Which part of the gap is corrected.

    d = [log π_old − log π_v] staleness + [log π_v − log μ] engine

π_v is the trainer's own numerics at the version that sampled the token. A correction of one part is
the same correction between other policies: π_v in the place of μ, or of π_old.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from trueup.errors import DataError
from trueup.gap import PolicyGap

Cause = Literal["total", "staleness", "engine"]
"""π_old against μ; π_old against π_v; π_v against μ."""


def part_of(gap: PolicyGap, cause: Cause) -> PolicyGap:
    """The gap between the two policies that a correction compares.

    Tokens without a known log μ stay excluded, whatever the cause.

    Raises:
        DataError: The cause is not the total, and a token was not scored under its own version.
    """
    if cause == "total":
        return gap
    scored = None if gap.logp_version is None else torch.isfinite(gap.logp_version)
    if gap.logp_version is None or scored is None or not bool(scored.all()):
        missing = gap.num_tokens if scored is None else int((~scored).sum())
        raise DataError(
            field="logp_version",
            rule=f"known for every token where the {cause} is corrected",
            value=f"{missing} of {gap.num_tokens} tokens without it",
        )
    if cause == "staleness":
        behaviour = torch.where(gap.valid, gap.logp_version, torch.nan)
        return replace(gap, logp_behaviour=behaviour)
    return replace(gap, logp_target=gap.logp_version)
