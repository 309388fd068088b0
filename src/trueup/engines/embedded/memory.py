"""From a version's tensors to what is multiplied, and back: what attestation reads.

A forward may read a copy of a published tensor: repacked, quantised, cast. Each copy made here is
remembered with its source, so that `Memory.tensors` finds one that is not (any more) the image of
the tensor that it stands for, and shows it in that tensor's place: the digest then differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.engines.embedded.linears import unquantised
from trueup.engines.embedded.parameters import Parameters
from trueup.models.linear import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """What a forward computes in."""

    dtype: torch.dtype
    head_dtype: torch.dtype
    """Of the logits' product."""
    scheme: str = "none"
    """Grid of weights and activations of the blocks' linear layers (`EngineConfig.quantize`)."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """Memory that stands for published tensors, stacked along their rows."""

    names: tuple[str, ...]
    read: Callable[[], Tensor]
    image: Callable[[Tensor], Tensor]
    """What `read` must give for the tensors as they were published."""


class Memory:
    """Hands out the tensors and layers of one version, and remembers what they stand for.

    Args:
        parameters: The version, as it was published.
        arithmetic: What to make of it.
    """

    def __init__(self, parameters: Parameters, arithmetic: Arithmetic) -> None:
        """Nothing has been handed out yet."""
        self._parameters = parameters
        self._arithmetic = arithmetic
        self._copies: list[_Copy] = []

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor in the forward's dtype, or in another."""
        target = dtype or self._arithmetic.dtype
        source = self._parameters.named[name]
        held = source.to(target)
        if held is not source:
            self._copies.append(_Copy((name,), lambda: held, lambda x: x.to(target)))
        return held

    def optional(self, name: str) -> Tensor | None:
        """As `tensor`; None if the model has none of this name."""
        return self.tensor(name) if name in self._parameters.named else None

    def linear(self, *modules: str) -> Linear:
        """The layer of some modules that read the same input, their outputs side by side."""
        names = tuple(f"{module}.weight" for module in modules)
        weight, bias = self._stacked(names), self._bias(modules)
        dtype = self._arithmetic.dtype
        return self._remembered(names, lambda w: unquantised(w.to(dtype), bias), weight)

    def head(self, name: str, bias_name: str) -> Linear:
        """The layer that gives the logits, in its own dtype."""
        dtype = self._arithmetic.head_dtype
        bias = self.tensor(bias_name, dtype) if bias_name in self._parameters.named else None
        weight = self._parameters.named[name]
        return self._remembered((name,), lambda w: unquantised(w.to(dtype), bias), weight)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the version, from the memory that is multiplied.

        Where a copy is the image of what was published, the published tensor is given; where it is
        not, the copy.
        """
        found = dict(self._parameters.named)
        for copy in self._copies:
            held, source = copy.read(), self._stacked(copy.names)
            if not torch.equal(held, copy.image(source)):
                rows = [len(self._parameters.named[name]) for name in copy.names]
                found |= zip(copy.names, torch.split(held.to(source.dtype), rows), strict=True)
        return found

    def _remembered(
        self, names: tuple[str, ...], make: Callable[[Tensor], Linear], weight: Tensor
    ) -> Linear:
        layer = make(weight)
        if layer.dense().data_ptr() != weight.data_ptr():
            self._copies.append(_Copy(names, layer.dense, lambda w: make(w).dense()))
        return layer

    def _bias(self, modules: Sequence[str]) -> Tensor | None:
        names = tuple(f"{module}.bias" for module in modules)
        if names[0] not in self._parameters.named:
            return None
        bias = self._stacked(names)
        held = bias.to(self._arithmetic.dtype)
        if held is not bias:
            self._copies.append(_Copy(names, lambda: held, lambda b: b.to(held.dtype)))
        return held

    def _stacked(self, names: Sequence[str]) -> Tensor:
        """The storage of some tensors that lie one after the other, or the one tensor."""
        if len(names) == 1:
            return self._parameters.named[names[0]]
        return self._parameters.fused[names[0]]
