"""Versions of the model directory that the suite publishes to an engine.

Legend: the first version is the directory's own weights; a later one has every matrix far from it,
so that whatever an engine keeps of the version before stands out from its rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trueup.sync.inprocess import InProcessTransport
from trueup.testing.engine.scoring import published
from trueup.types import WeightManifest

_NOISE = 0.5
"""Standard deviation of the change of a matrix, in those of its elements."""


@dataclass(kw_only=True)
class Publisher:
    """Publishes versions in the precision that an engine wants."""

    base: Mapping[str, Tensor]
    """The directory's weights, float32."""
    precision: str
    transport: InProcessTransport = field(default_factory=InProcessTransport)
    tensors: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)
    """What each version consists of."""

    @property
    def latest(self) -> Mapping[str, Tensor]:
        """What was published last."""
        return self.tensors[len(self.tensors)]

    def first(self) -> WeightManifest:
        """The directory's own weights."""
        return self._publish(self.base)

    def changed(self) -> WeightManifest:
        """Weights that no earlier version had."""
        noise = torch.Generator().manual_seed(len(self.tensors))
        return self._publish(
            {
                name: x + _NOISE * x.std() * torch.randn(x.shape, generator=noise)
                if x.dim() == 2
                else x
                for name, x in self.base.items()
            }
        )

    def _publish(self, tensors: Mapping[str, Tensor]) -> WeightManifest:
        version = len(self.tensors) + 1
        self.tensors[version] = published(tensors, self.precision)
        return self.transport.publish(version, self.tensors[version])
