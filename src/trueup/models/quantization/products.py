"""Products of numbers on a grid: by the machine's own kernels, or emulated in a wider dtype.

Each computes (Σ_k x̂ ŵ) · s_x · s_w for numbers x̂, ŵ of a grid. Integers are summed exactly; the
others differ in the order of their float32 sum and, emulated in bfloat16, in one rounding of it.

M tokens, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812  the name of the field
from torch import Tensor

from trueup.models.linear import Linear

_LEAST_ROWS = 32
"""Tokens that the integer kernel of GPUs is given; it takes more than 16."""


class Product(Protocol):
    """Multiplies by one weight [N, K] on a grid."""

    def __call__(self, values: Tensor, input_scales: Tensor, scales: Tensor) -> Tensor:
        """[M, N] scaled sums in a float dtype, in memory of their own.

        Args:
            values: [M, K] numbers of the inputs' grid, float32.
            input_scales: [M, 1] or [].
            scales: [N, 1] or [], of the weight.
        """
        ...

    def part(self, first: int, end: int) -> Product:
        """That of rows first ... end-1 of the weight."""
        ...

    def values(self) -> Tensor:
        """[N, K] the weight's numbers on the grid, read from where they lie."""
        ...


class Emulated:
    """Multiplies grid numbers as numbers of the layer's dtype, which holds them exactly.

    Args:
        linear: Any layer whose weight they are.
        dtype: In which it computes.
    """

    def __init__(self, linear: Linear, dtype: torch.dtype) -> None:
        """Share the layer."""
        self._linear = linear
        self._dtype = dtype

    def __call__(self, values: Tensor, input_scales: Tensor, scales: Tensor) -> Tensor:
        """See `Product`."""
        return _scaled(self._linear(values.to(self._dtype)), input_scales, scales)

    def part(self, first: int, end: int) -> Emulated:
        """See `Product.part`."""
        return Emulated(self._linear.part(first, end), self._dtype)

    def values(self) -> Tensor:
        """See `Product.values`."""
        return self._linear.dense()


class Integer:
    """Multiplies INT8 by INT8 into INT32: VNNI on CPUs, tensor cores on GPUs.

    Args:
        weight: [N, K] int8.
    """

    def __init__(self, weight: Tensor) -> None:
        """Share the weight."""
        self._weight = weight
        self._turned = weight.t()

    def __call__(self, values: Tensor, input_scales: Tensor, scales: Tensor) -> Tensor:
        """See `Product`."""
        integers = values.to(torch.int8)
        if integers.is_cuda and len(values) < _LEAST_ROWS:
            padded = F.pad(integers, (0, 0, 0, _LEAST_ROWS - len(values)))
            sums = torch._int_mm(padded, self._turned)[: len(values)]
        else:
            sums = torch._int_mm(integers, self._turned)
        return _scaled(sums, input_scales, scales)

    def part(self, first: int, end: int) -> Integer:
        """See `Product.part`."""
        return Integer(self._weight[first:end])

    def values(self) -> Tensor:
        """See `Product.values`."""
        return self._weight


class ScaledE4M3:
    """Multiplies E4M3 by E4M3 into float32: the FP8 units of GPUs, a slow loop on CPUs.

    Args:
        weight: [N, K] float8_e4m3fn.
        dtype: Of what the kernel gives.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        """Share the weight."""
        self._weight = weight
        self._dtype = dtype

    def __call__(self, values: Tensor, input_scales: Tensor, scales: Tensor) -> Tensor:
        """See `Product`."""
        if input_scales.ndim or scales.ndim:  # the kernel wants both per row, or neither
            input_scales = input_scales.expand(len(values), 1).contiguous()
            scales = scales.expand(len(self._weight), 1).contiguous()
        return torch._scaled_mm(
            values.to(torch.float8_e4m3fn),
            self._weight.t(),
            input_scales,
            scales.t(),
            out_dtype=self._dtype,
        )

    def part(self, first: int, end: int) -> ScaledE4M3:
        """See `Product.part`."""
        return ScaledE4M3(self._weight[first:end], self._dtype)

    def values(self) -> Tensor:
        """See `Product.values`."""
        return self._weight


def _scaled(sums: Tensor, input_scales: Tensor, scales: Tensor) -> Tensor:
    """Scaled in float32; in place where the sums are the caller's own and float32 already."""
    return sums.float().mul_(scales.t()).mul_(input_scales)
