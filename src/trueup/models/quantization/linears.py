"""Linear layers on a coarser grid.

Where inputs and weight have scales that do not vary along the sum, numbers of the grid are
multiplied and the scales follow (`OnGrid`); a real kernel does the same on the same numbers.
Otherwise the weight is held as the grid leaves it, in the layer's dtype, and so are the inputs
where a scheme quantises them (`Between`): in bfloat16 the scales cost each operand one rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from trueup.models.dense import Dense
from trueup.models.linear import Linear
from trueup.models.quantization.grids import E4M3, INT8
from trueup.models.quantization.inputs import Inputs, Tap
from trueup.models.quantization.products import Emulated, Integer, Product, ScaledE4M3
from trueup.models.quantization.scaling import Quantizer
from trueup.models.quantization.schemes import Scheme

Kernel = Literal["fastest", "real", "emulated"]
"""`real`: the machine's own kernel for the scheme; `fastest`: that where it is faster than
emulation; either emulates a scheme that has none."""


def quantized(
    weight: Tensor,
    bias: Tensor | None,
    scheme: Scheme,
    *,
    dtype: torch.dtype,
    rows: Sequence[int] = (),
    kernel: Kernel = "fastest",
    tap: Tap | None = None,
    plain: Callable[[Tensor, Tensor | None], Linear] = Dense,
) -> Linear:
    """A layer that multiplies what a scheme says.

    Args:
        weight: [N, K] as the version brings it; rounded here, and not kept.
        bias: [N]; rounded only by a scheme that rounds everything.
        scheme: The grids.
        dtype: Of inputs and outputs.
        rows: Output rows of each module where several are stacked: no scale spans two of them.
        kernel: What multiplies.
        tap: Sees and replaces the scales of the inputs.
        plain: Makes the layers of `dtype` that emulation multiplies with.
    """
    modules = torch.split(weight.float(), list(rows) or [len(weight)])
    bias = None if bias is None else scheme.other(bias).to(dtype)
    activation = scheme.activation
    if activation is None or activation.along_inputs:
        layer = plain(_stacked([scheme.weight.rounded(w).to(dtype) for w in modules]), bias)
        return layer if activation is None else Between(layer, Inputs(activation, tap))
    values, scales = _on_grid(modules, scheme.weight)
    kind = _kernel(scheme, kernel, weight, dtype)
    product: Product
    if kind == "integer":
        product = Integer(values.to(torch.int8))
    elif kind == "e4m3":
        product = ScaledE4M3(values.to(torch.float8_e4m3fn), dtype)
    else:
        product = Emulated(plain(values.to(dtype), None), dtype)
    return OnGrid(product, scales, bias, Inputs(activation, tap))


class OnGrid:
    """Multiplies numbers of a grid and scales the sum; see `models.linear.Linear`.

    Args:
        product: Multiplies by the weight's numbers.
        scales: [N, 1] or [], of the weight.
        bias: [N].
        inputs: Brings inputs onto their grid; one scale per token, or for all.
    """

    def __init__(
        self, product: Product, scales: Tensor, bias: Tensor | None, inputs: Inputs
    ) -> None:
        """Share all of it."""
        self._product = product
        self._scales = scales
        self._bias = bias
        self._inputs = inputs

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return self._sums(x).to(x.dtype)

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Linear.add`."""
        return self._sums(x).add_(residual).to(x.dtype)

    def part(self, first: int, end: int) -> OnGrid:
        """See `Linear.part`."""
        return OnGrid(
            self._product.part(first, end),
            self._scales[first:end] if self._scales.ndim else self._scales,
            None if self._bias is None else self._bias[first:end],
            self._inputs.part(first, end),
        )

    def dense(self) -> Tensor:
        """See `Linear.dense`; float32."""
        return self._product.values().float() * self._scales

    def _sums(self, x: Tensor) -> Tensor:
        sums = self._product(*self._inputs.quantized(x), self._scales)
        return sums if self._bias is None else sums.add_(self._bias)


class Between:
    """Rounds its inputs, then multiplies them like any others; see `models.linear.Linear`.

    Args:
        linear: Holds the weight as its grid leaves it.
        inputs: Brings inputs onto their grid.
    """

    def __init__(self, linear: Linear, inputs: Inputs) -> None:
        """Share both."""
        self._linear = linear
        self._inputs = inputs

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return self._linear(self._inputs.rounded(x))

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Linear.add`."""
        return self._linear.add(residual, self._inputs.rounded(x))

    def part(self, first: int, end: int) -> Between:
        """See `Linear.part`."""
        return Between(self._linear.part(first, end), self._inputs.part(first, end))

    def dense(self) -> Tensor:
        """See `Linear.dense`."""
        return self._linear.dense()


def _on_grid(modules: Sequence[Tensor], quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    """Numbers of the grid [N, K], float32, and their scales: [N, 1], or [] of one module."""
    scales = [quantizer.scales(weight) for weight in modules]
    values = [quantizer.quantize(*pair) for pair in zip(modules, scales, strict=True)]
    if len(modules) > 1:
        scales = [s.expand(len(weight), 1) for s, weight in zip(scales, modules, strict=True)]
    return _stacked(values), _stacked(scales)


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _kernel(
    scheme: Scheme, kernel: Kernel, weight: Tensor, dtype: torch.dtype
) -> Literal["integer", "e4m3", "none"]:
    """Which real kernel multiplies."""
    activation = scheme.activation
    if kernel == "emulated" or activation is None or activation.grid != scheme.weight.grid:
        return "none"
    if activation.grid == INT8:
        return "integer" if kernel == "real" or _fast_int8(weight) else "none"
    if activation.grid == E4M3:
        return "e4m3" if kernel == "real" or _fast_e4m3(weight, dtype) else "none"
    return "none"


def _fast_int8(weight: Tensor) -> bool:
    if weight.is_cuda:
        return _aligned(weight)
    return torch.cpu._is_vnni_supported()


def _fast_e4m3(weight: Tensor, dtype: torch.dtype) -> bool:
    """On GPUs with FP8 units, whose kernel gives bfloat16 where scales are per row."""
    if not weight.is_cuda or dtype is not torch.bfloat16:
        return False
    return _aligned(weight) and torch.cuda.get_device_capability(weight.device) >= (8, 9)


def _aligned(weight: Tensor) -> bool:
    """Whether sizes are what the kernels of GPUs take."""
    return all(size % 16 == 0 for size in weight.shape)
