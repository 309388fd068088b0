"""From tokens to one number, in a way that micro-batches and ranks cannot change.

The denominator Z is fixed once for the step batch. A sum over tokens divided by Z is additive: the
parts of any split sum to the whole.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trueup.errors import DataError

DenominatorKind = Literal["all", "kept"]
"""Z counts all action tokens of the step batch, or those that take part in the loss."""


def denominator(kind: DenominatorKind, *, num_all: float, num_kept: float) -> float:
    """Z of a step batch; 1 when there is nothing to count, so that an empty loss is 0, not NaN.

    Args:
        kind: What Z counts.
        num_all: Action tokens of the step batch.
        num_kept: Those in the loss.
    """
    return max(1.0, num_all if kind == "all" else num_kept)


def token_sum(per_token: Tensor, keep: Tensor, *, denominator: float) -> Tensor:
    """(1/Z) Σ over kept tokens.

    Args:
        per_token: [N] loss terms.
        keep: [N] bool.
        denominator: Z of the whole step batch, whichever part `per_token` is.

    Raises:
        DataError: Z is not positive.
    """
    if not denominator > 0:
        raise DataError(field="denominator", rule="> 0", value=denominator)
    return torch.where(keep, per_token, 0.0).sum() / denominator
