"""One complete set of a model's tensors, in memory that nobody else holds.

Every version that an engine stages is copied into such a set. Tensors that a forward wants fused
(query, key and value) lie one after the other in one storage and are *views* of it by name: the
digest of the named views is therefore the digest of the very memory that the forward reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from trueup.errors import TransportFault

Spec = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of every tensor that makes up the model."""


class Parameters:
    """Owns the memory of every tensor of one version.

    Args:
        spec: What makes up the model.
        fused: Groups of names whose tensors are stacked along their first dimension.
        device: Where the memory lies.
    """

    def __init__(self, spec: Spec, fused: Iterable[Sequence[str]], device: torch.device) -> None:
        """Allocate, without values."""
        self.named: dict[str, Tensor] = {}
        """Every tensor by name."""
        self.fused: dict[str, Tensor] = {}
        """The stacked storage of each group, by the name of its first member."""
        for group in fused:
            shapes = [spec[name][0] for name in group]
            rows = [shape[0] for shape in shapes]
            stacked = torch.empty(
                (sum(rows), *shapes[0][1:]), dtype=spec[group[0]][1], device=device
            )
            self.fused[group[0]] = stacked
            self.named.update(zip(group, torch.split(stacked, rows), strict=True))
        for name, (shape, dtype) in spec.items():
            if name not in self.named:
                self.named[name] = torch.empty(shape, dtype=dtype, device=device)

    def tensors(self) -> Mapping[str, Tensor]:
        """Every tensor by name (`network.Prepared`)."""
        return self.named

    def drop(self, names: Sequence[str]) -> None:
        """Free the memory of some tensors, all of their group, of which a copy is read instead."""
        for name in names:
            del self.named[name]
        self.fused.pop(names[0], None)

    def copy_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the values of a version; the caller has verified it with `verify`."""
        for name, own in self.named.items():
            own.copy_(tensors[name])


def verify(spec: Spec, tensors: Mapping[str, Tensor], *, version: int) -> None:
    """Refuse a version that is not exactly what the model consists of.

    Raises:
        TransportFault: A tensor is missing, foreign, or of another shape or dtype; `field` names
            it.
    """
    prefix = f"version {version}"
    for name in sorted(spec.keys() - tensors.keys()):
        raise TransportFault(field=f"{prefix}: {name}", rule="present", value="nothing")
    for name in sorted(tensors.keys() - spec.keys()):
        raise TransportFault(
            field=f"{prefix}: {name}", rule="a tensor of this model", value="a foreign name"
        )
    for name, expected in spec.items():
        found = (tuple(tensors[name].shape), tensors[name].dtype)
        if found != expected:
            raise TransportFault(
                field=f"{prefix}: {name}", rule=f"of shape and dtype {expected}", value=found
            )
