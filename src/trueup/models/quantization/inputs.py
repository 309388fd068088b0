"""Bringing the inputs of a layer onto a grid, and the tap through which their scales pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trueup.models.quantization.scaling import Quantizer

if TYPE_CHECKING:
    from torch import Tensor


class Tap(Protocol):
    """Sees the scales that a layer's inputs ask for, and says which they get."""

    def __call__(self, scales: Tensor) -> Tensor:
        """The scales to use: these, or others that broadcast to one per token."""
        ...

    def part(self, first: int, end: int) -> Tap:
        """The tap of the layer of output rows first ... end-1."""
        ...


@dataclass(frozen=True, slots=True)
class Inputs:
    """Quantises what a layer is given, by scales taken from it."""

    quantizer: Quantizer
    tap: Tap | None = None

    def quantized(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of the grid [M, K], float32, and their scales."""
        wide = x.float()
        scales = self.quantizer.scales(wide)
        if self.tap is not None:
            scales = self.tap(scales)
        return self.quantizer.quantize(wide, scales), scales

    def rounded(self, x: Tensor) -> Tensor:
        """The inputs [M, K] as the grid leaves them, in their own dtype."""
        return self.quantizer.dequantize(*self.quantized(x)).to(x.dtype)

    def part(self, first: int, end: int) -> Inputs:
        """Those of the layer of output rows first ... end-1."""
        return Inputs(self.quantizer, None if self.tap is None else self.tap.part(first, end))
