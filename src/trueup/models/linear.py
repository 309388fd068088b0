"""What a forward pass needs of a linear layer, whatever multiplies behind it.

A layer may hold its weight as it is, repacked for a kernel, or on a coarser grid. All that a
forward knows is the product.

M: tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Linear(Protocol):
    """A fixed weight and bias."""

    def __call__(self, x: Tensor) -> Tensor:
        """The product x Wᵀ + b: [M, in] -> [M, out], in the dtype of x."""
        ...

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """Residual + x Wᵀ + b: [M, out]; neither argument is changed."""
        ...

    def part(self, first: int, end: int) -> Linear:
        """The layer of output rows first ... end-1, on the same grid and in the same memory."""
        ...

    def dense(self) -> Tensor:
        """[out, in] the weight that is really multiplied, read back from where it lies."""
        ...
