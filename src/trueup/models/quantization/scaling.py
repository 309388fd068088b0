"""Scales that map a tensor's values onto a grid, and the parts of a tensor that share one.

A part is a block of rows and columns. For weights, rows are output channels; for activations, they
are tokens; columns are always the inputs that a product sums over. Blocks at the edge are smaller.

R, C: rows and columns of a tensor; P, Q: blocks along them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812  the name of the field
from torch import Tensor

from trueup.models.quantization.grids import Grid, power_above

_LEAST = 2.0**-100
"""Least magnitude that a block is scaled by: one of zeros stays zeros, and no scale underflows."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sizes of the blocks that share a scale; None: all rows, all columns."""

    rows: int | None = None
    columns: int | None = None


TENSOR = Blocks()
ROW = Blocks(rows=1)
"""One scale per output channel, or per token."""

Scale = Literal["fit", "power_of_two", "one"]
"""`fit`: the largest magnitude of a block becomes the largest number of the grid. `power_of_two`:
the least power of two with which nothing saturates, as kernels of MXFP8 round it [2506.08027]; the
rule of the format's standard takes half of that for some blocks, and their largest saturates.
`one`: no scaling."""


@dataclass(frozen=True, slots=True)
class Quantizer:
    """How one operand of a product is brought onto a grid."""

    grid: Grid
    blocks: Blocks = TENSOR
    scale: Scale = "fit"

    @property
    def along_inputs(self) -> bool:
        """Whether scales differ along the sum of a product, so that they cannot follow it."""
        return self.blocks.columns is not None

    def scales(self, x: Tensor) -> Tensor:
        """Scales of a float32 tensor [R, C]: [P, Q], and [] where the whole tensor shares one."""
        if self.scale == "one":
            return x.new_ones(())
        fitted = _largest(x, self.blocks).clamp_(min=_LEAST).div_(self.grid.largest)
        return fitted if self.scale == "fit" else power_above(fitted)

    def quantize(self, x: Tensor, scales: Tensor) -> Tensor:
        """The grid's numbers nearest to x over its scales: [R, C], float32."""
        return self.grid.round_(x / spread(scales, self.blocks, x))

    def dequantize(self, values: Tensor, scales: Tensor) -> Tensor:
        """Numbers of the grid times their scales: [R, C], float32."""
        values = values.float()
        return values * spread(scales, self.blocks, values)

    def rounded(self, x: Tensor) -> Tensor:
        """A float32 tensor [R, C] as the grid leaves it."""
        scales = self.scales(x)
        return self.dequantize(self.quantize(x, scales), scales)


def spread(scales: Tensor, blocks: Blocks, like: Tensor) -> Tensor:
    """Scales in a shape that broadcasts against the tensor [R, C] that they belong to."""
    if not scales.ndim or blocks == ROW:
        return scales
    if blocks.rows is not None:
        scales = scales.repeat_interleave(blocks.rows, 0)[: len(like)]
    if blocks.columns is not None:
        scales = scales.repeat_interleave(blocks.columns, 1)[:, : like.shape[1]]
    return scales


def _largest(x: Tensor, blocks: Blocks) -> Tensor:
    """Largest magnitude of every block, [P, Q] or []; NaN where a block holds one."""
    if blocks == TENSOR:
        low, high = torch.aminmax(x)
        return torch.maximum(high, -low)
    if blocks == ROW:
        return x.abs().amax(1, keepdim=True)
    rows, columns = blocks.rows or len(x), blocks.columns or x.shape[1]
    padded = F.pad(x, (0, -x.shape[1] % columns, 0, -len(x) % rows))
    return padded.view(len(padded) // rows, rows, -1, columns).abs().amax((1, 3))
