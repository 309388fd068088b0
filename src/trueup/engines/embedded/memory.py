"""From a version's tensors to what is multiplied, and back: what attestation reads.

A forward may read a copy of a published tensor: repacked, quantised, cast. A copy that gives the
tensor back exactly takes its place, and the tensor is freed. Any other is remembered with its
source, so that `Memory.tensors` finds one that is not (any more) the image of the tensor that it
stands for, and shows it in that tensor's place: the digest then differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trueup.engines.embedded.linears import exact
from trueup.engines.embedded.parameters import Parameters
from trueup.models.linear import Linear
from trueup.models.quantization.linears import quantized
from trueup.models.quantization.recording import Recorder
from trueup.models.quantization.schemes import Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """What a forward computes in."""

    dtype: torch.dtype
    head_dtype: torch.dtype
    """Of the logits' product."""
    scheme: Scheme | None = None
    """Grids of the blocks' linear layers."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """Memory that stands for published tensors, stacked along their rows."""

    names: tuple[str, ...]
    rows: list[int]
    """Of each."""
    read: Callable[[], Tensor]
    image: Callable[[Tensor], Tensor] | None
    """What `read` must give for the tensors as they were published; None: the tensors themselves,
    which are not held any more."""


class _Reading(Mapping[str, Tensor]):
    """Tensors that are read one at a time: a digest needs no second copy of the model."""

    def __init__(self, read: Mapping[str, Callable[[], Tensor]]) -> None:
        self._read = read

    def __getitem__(self, name: str) -> Tensor:
        return self._read[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


class Memory:
    """Hands out the tensors and layers of one version, and remembers what they stand for.

    Nothing here refers back to itself, so that a version's memory is free as soon as it is not
    served any more, and not when the garbage collector comes by.

    Args:
        parameters: The version, as it was published.
        arithmetic: What to make of it.
        recorder: Notes the scales of the layers' inputs, where all tokens share one.
    """

    def __init__(
        self, parameters: Parameters, arithmetic: Arithmetic, recorder: Recorder | None = None
    ) -> None:
        """Nothing has been handed out yet."""
        self._parameters = parameters
        self._arithmetic = arithmetic
        self._recorder = recorder
        self._copies: list[_Copy] = []
        self._read: set[str] = set()
        """Tensors that are read themselves: a tied embedding, whatever its head reads."""

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor in the forward's dtype, or in another."""
        target, scheme = dtype or self._arithmetic.dtype, self._arithmetic.scheme
        return self._held((name,), lambda x: _other(x, scheme).to(target))

    def optional(self, name: str) -> Tensor | None:
        """As `tensor`; None if the model has none of this name."""
        return self.tensor(name) if name in self._parameters.named else None

    def linear(self, *modules: str) -> Linear:
        """The layer of some modules that read the same input, their outputs side by side."""
        names = tuple(f"{module}.weight" for module in modules)
        biases = tuple(f"{module}.bias" for module in modules)
        dtype, scheme = self._arithmetic.dtype, self._arithmetic.scheme
        bias = None
        if biases[0] in self._parameters.named:
            bias = self._held(biases, lambda b: _other(b, scheme).to(dtype))
        if scheme is None:
            return self._layer(names, lambda weight: exact(weight.to(dtype), bias))
        rows = self._rows(names)
        tap = self._recorder.tap(modules, rows) if self._recorder is not None else None
        return self._layer(
            names,
            lambda weight: quantized(
                weight, bias, scheme, dtype=dtype, rows=rows, tap=tap, plain=exact
            ),
        )

    def head(self, name: str, bias_name: str) -> Linear:
        """The layer that gives the logits, in its own dtype."""
        dtype, scheme = self._arithmetic.head_dtype, self._arithmetic.scheme
        bias = self.tensor(bias_name, dtype) if bias_name in self._parameters.named else None
        return self._layer((name,), lambda weight: exact(_other(weight, scheme).to(dtype), bias))

    def tensors(self) -> Mapping[str, Tensor]:
        """Every tensor of the version, read from the memory that is multiplied when asked for.

        Where a copy is the image of what was published, the published tensor is given; where it is
        not, the copy.
        """
        found: dict[str, Callable[[], Tensor]] = {
            name: partial(_given, tensor) for name, tensor in self._parameters.named.items()
        }
        for copy in self._copies:
            if copy.image is not None and torch.equal(
                copy.read(), copy.image(self._stacked(copy.names))
            ):
                continue
            for index, name in enumerate(copy.names):
                found[name] = partial(self._part, copy, index)
        return _Reading(found)

    def _part(self, copy: _Copy, index: int) -> Tensor:
        """The rows of one tensor in a copy."""
        held = copy.read()
        if copy.image is not None:
            held = held.to(self._stacked(copy.names).dtype)
        return torch.split(held, copy.rows)[index]

    def _held(self, names: tuple[str, ...], image: Callable[[Tensor], Tensor]) -> Tensor:
        self._read.update(names)
        source = self._stacked(names)
        held = image(source)
        if held is not source:
            self._copies.append(_Copy(names, self._rows(names), lambda: held, image))
        return held

    def _layer(self, names: tuple[str, ...], make: Callable[[Tensor], Linear]) -> Linear:
        source, rows = self._stacked(names), self._rows(names)
        layer = make(source)
        dense = layer.dense()
        if dense.data_ptr() == source.data_ptr():
            return layer
        exactly = dense.dtype is source.dtype and torch.equal(dense, source)
        if exactly and self._read.isdisjoint(names):
            self._copies.append(_Copy(names, rows, layer.dense, None))
            self._parameters.drop(names)
        else:
            self._copies.append(_Copy(names, rows, layer.dense, lambda w: make(w).dense()))
        return layer

    def _rows(self, names: Sequence[str]) -> list[int]:
        return [len(self._parameters.named[name]) for name in names]

    def _stacked(self, names: Sequence[str]) -> Tensor:
        """The storage of some tensors that lie one after the other, or the one tensor."""
        if len(names) == 1:
            return self._parameters.named[names[0]]
        return self._parameters.fused[names[0]]


def _other(parameter: Tensor, scheme: Scheme | None) -> Tensor:
    """A parameter that is no weight of a block's linear layer."""
    return parameter if scheme is None else scheme.other(parameter)


def _given(tensor: Tensor) -> Tensor:
    return tensor
