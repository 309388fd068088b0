"""Linear layers in the order in which the CPU's kernels read a weight.

oneDNN multiplies faster by a weight that lies in its own order (a sixth on one core, a third on
two), and that is a second copy, which a new version must reach too. It can be read back
(`Linear.dense`), and the engine attests that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trueup.models.dense import Dense
from trueup.models.linear import Linear

_PACKED_FROM = 1 << 17
"""Elements from which repacking pays: below, the call costs more than the product."""
_MKLDNN: Any = torch.ops.mkldnn


class Packed:
    """A weight in oneDNN's order; see `models.linear.Linear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Repack a copy of the weight."""
        self._packed: Tensor = _MKLDNN._reorder_linear_weight(weight.contiguous(), 32)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        product: Tensor = _MKLDNN._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Linear.add`."""
        total: Tensor = _MKLDNN._linear_pointwise.binary(
            x, residual, self._packed, self._bias, "add"
        )
        return total

    def part(self, first: int, end: int) -> Linear:
        """See `Linear.part`; a copy, because rows do not lie together here."""
        return Packed(
            self.dense()[first:end], None if self._bias is None else self._bias[first:end]
        )

    def dense(self) -> Tensor:
        """See `Linear.dense`."""
        return self._packed.to_dense()


def exact(weight: Tensor, bias: Tensor | None) -> Linear:
    """The fastest layer that multiplies by exactly this weight here."""
    if _packs(weight):
        return Packed(weight, bias)
    return Dense(weight, bias)


def _packs(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.numel() < _PACKED_FROM:
        return False
    if weight.dtype is torch.bfloat16:
        return bool(_MKLDNN._is_mkldnn_bf16_supported())
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
