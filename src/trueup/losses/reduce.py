"""From tokens to one number, in a way that micro-batches and ranks cannot change.

An aggregation gives each token a share that depends on its own episode alone, and one denominator Z
of the whole step batch. A sum of shares divided by Z is additive: the parts of any split sum to the
whole, and Z of the whole is the sum of the parts' counts.

| aggregation | share of a token | Z | name in the field |
|---|---|---|---|
| `token_mean` | 1 | tokens | DAPO |
| `sequence_mean` | 1 / tokens of its episode | episodes | GRPO |
| `sequence_sum` | 1 / a constant | episodes | Dr. GRPO |

Shapes: N action tokens, E episodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trueup.errors import DataError

DenominatorKind = Literal["all", "kept"]
"""Z counts all action tokens of the step batch, or those that take part in the loss."""
AggregationKind = Literal["token_mean", "sequence_mean", "sequence_sum"]


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """How the terms of a step batch, or of some of its episodes, become one number."""

    share: Tensor
    """[N] float32 > 0."""
    count: Tensor
    """[] float64: tokens or episodes that Z counts; counts of parts add up."""

    @property
    def denominator(self) -> float:
        """Z; 1 when there is nothing to count, so that an empty loss is 0, not NaN."""
        return max(1.0, float(self.count))


def aggregation(
    kind: AggregationKind,
    *,
    counted: Tensor,
    episode: Tensor,
    num_episodes: int,
    constant: float,
) -> Aggregation:
    """Shares and Z of whole episodes.

    Args:
        kind: Which.
        counted: [N] bool: the tokens that the denominator knows of, all or the kept.
        episode: [N] int64.
        num_episodes: E.
        constant: Of `sequence_sum`: the most tokens that an episode may have.
    """
    ones = torch.ones(len(counted), device=counted.device)
    if kind == "token_mean":
        return Aggregation(share=ones, count=counted.sum().double())
    tokens = ones.new_zeros(num_episodes).index_add(0, episode, counted.float())
    share = 1 / tokens.clamp(min=1)[episode] if kind == "sequence_mean" else ones / constant
    return Aggregation(share=share, count=(tokens > 0).sum().double())


def denominator(kind: DenominatorKind, *, num_all: float, num_kept: float) -> float:
    """Z of a step batch in tokens; 1 when there is nothing to count.

    Args:
        kind: What Z counts.
        num_all: Action tokens of the step batch.
        num_kept: Those in the loss.
    """
    return max(1.0, num_all if kind == "all" else num_kept)


def token_sum(per_token: Tensor, keep: Tensor, *, denominator: float) -> Tensor:
    """(1/Z) Σ over kept tokens.

    Args:
        per_token: [N] loss terms, times their shares.
        keep: [N] bool.
        denominator: Z of the whole step batch, whichever part `per_token` is.

    Raises:
        DataError: Z is not positive.
    """
    if not denominator > 0:
        raise DataError(field="denominator", rule="> 0", value=denominator)
    return torch.where(keep, per_token, 0.0).sum() / denominator
