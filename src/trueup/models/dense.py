"""A linear layer that multiplies by its weight as it is."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  the name of the field
from torch import Tensor


class Dense:
    """A weight as it is; see `models.linear.Linear`.

    Args:
        weight: [out, in], whose memory is shared.
        bias: [out], likewise.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Share the memory of both."""
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return F.linear(x, self._weight, self._bias)

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Linear.add`."""
        total = torch.addmm(residual, x, self._weight.t())
        return total if self._bias is None else total.add_(self._bias)

    def part(self, first: int, end: int) -> Dense:
        """See `Linear.part`."""
        return Dense(self._weight[first:end], None if self._bias is None else self._bias[first:end])

    def dense(self) -> Tensor:
        """See `Linear.dense`."""
        return self._weight
