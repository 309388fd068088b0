"""The named ways to quantise a rollout forward.

A scheme says what the linear layers of the transformer blocks multiply: on which grid their weights
are, and on which their inputs, whose scales come from the inputs themselves at every forward.
Embeddings, norms, biases and the LM head stay as they are, as in the engines of practice, except
under `fp8_cast_all`. Weights are rounded from the tensors of the version as they arrive, not from a
copy in the engine's dtype.

To add one: an entry in `SCHEMES` and its name in `config.EngineConfig.quantize`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trueup.errors import ConfigError
from trueup.models.quantization.grids import E2M1, E4M3, INT4, INT8
from trueup.models.quantization.scaling import ROW, TENSOR, Blocks, Quantizer

if TYPE_CHECKING:
    from torch import Tensor

_GROUP = Blocks(rows=1, columns=32)
_TILE = Blocks(rows=128, columns=128)
_STRIP = Blocks(rows=1, columns=128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What the linear layers multiply."""

    weight: Quantizer
    activation: Quantizer | None
    """None: inputs stay as they are."""
    everywhere: bool = False
    """Every other parameter is rounded as well, to the weights' grid."""
    meaning: str
    source: str

    @property
    def one_scale(self) -> bool:
        """Whether all tokens of a forward share the scale of a layer's inputs.

        Then a token's log-prob depends on what it was batched with, and the scale is worth
        recording.
        """
        return (
            self.activation is not None
            and self.activation.blocks == TENSOR
            and self.activation.scale != "one"
        )

    def other(self, parameter: Tensor) -> Tensor:
        """What becomes of a parameter that is no weight of a block's linear layer."""
        if not self.everywhere:
            return parameter
        return self.weight.grid.round_(parameter.float().clone()).to(parameter.dtype)


SCHEMES: Mapping[str, Scheme] = {
    "fp8": Scheme(
        weight=Quantizer(E4M3),
        activation=Quantizer(E4M3),
        meaning="E4M3 weights and activations, one scale per tensor; that of the activations is "
        "taken from every forward",
        source="dynamic per-tensor W8A8, as in vLLM's `fp8`",
    ),
    "fp8_row": Scheme(
        weight=Quantizer(E4M3, ROW),
        activation=Quantizer(E4M3, ROW),
        meaning="E4M3 weights, a scale per output channel; E4M3 activations, a scale per token",
        source="PTPC, as in vLLM's `fp8_per_channel`",
    ),
    "fp8_block": Scheme(
        weight=Quantizer(E4M3, _TILE),
        activation=Quantizer(E4M3, _STRIP),
        meaning="E4M3 weights, a scale per 128 x 128 tile; E4M3 activations, a scale per token and "
        "128 inputs",
        source="DeepSeek-V3",
    ),
    "mxfp8": Scheme(
        weight=Quantizer(E4M3, _GROUP, "power_of_two"),
        activation=Quantizer(E4M3, _GROUP, "power_of_two"),
        meaning="E4M3 weights and activations, a power of two per 32 inputs",
        source="OCP microscaling formats 1.0, scales rounded up as on GPUs",
    ),
    "fp8_weight": Scheme(
        weight=Quantizer(E4M3),
        activation=None,
        meaning="E4M3 weights, one scale per tensor; activations as they are",
        source="weight-only W8A16",
    ),
    "fp8_cast_all": Scheme(
        weight=Quantizer(E4M3, scale="one"),
        activation=None,
        everywhere=True,
        meaning="every parameter, norms and embeddings included, cast to E4M3 without a scale",
        source="a cast of the state dict; what is below 2^-10 becomes 0",
    ),
    "int8": Scheme(
        weight=Quantizer(INT8, ROW),
        activation=Quantizer(INT8, ROW),
        meaning="INT8 weights, a scale per output channel; INT8 activations, a scale per token",
        source="dynamic W8A8, as in compressed-tensors `int-quantized`",
    ),
    "int8_weight": Scheme(
        weight=Quantizer(INT8, ROW),
        activation=None,
        meaning="INT8 weights, a scale per output channel; activations as they are",
        source="weight-only W8A16",
    ),
    "fp4": Scheme(
        weight=Quantizer(E2M1, _GROUP),
        activation=Quantizer(E2M1, _GROUP),
        meaning="E2M1 weights and activations, a scale per 32 inputs",
        source="W4A4 as MXFP4 and NVFP4 do it, with scales in float32",
    ),
    "int4": Scheme(
        weight=Quantizer(INT4, _GROUP),
        activation=None,
        meaning="INT4 weights, a scale per 32 inputs; activations as they are",
        source="weight-only W4A16, symmetric, group size 32",
    ),
}
"""The schemes by the names of `config.EngineConfig.quantize`; `none` is none of them."""


def scheme(name: str) -> Scheme:
    """The scheme of a name.

    Raises:
        ConfigError: There is none.
    """
    if name not in SCHEMES:
        raise ConfigError(field="engine.quantize", rule=f"one of {sorted(SCHEMES)}", value=name)
    return SCHEMES[name]
