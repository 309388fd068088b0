"""How a version of the weights travels from trainer to engines.

A transport publishes tensors first and the manifest last, so that a manifest that exists describes
a version that is whole. `fetch` verifies what it read against the manifest. A transport that
rewrites tensors in place is not `atomic`: an engine must then be fenced until its load is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from trueup.types import WeightManifest

if TYPE_CHECKING:
    import torch


class Transport(Protocol):
    """Moves named tensors of one version."""

    name: str
    atomic: bool
    """A reader sees the old version or the new one, never both."""

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> WeightManifest:
        """Write a version whole; versions only grow.

        Raises:
            TransportFault: The version is not newer than the last one, or the write failed; what
                was published before stays readable.
        """
        ...

    def fetch(self, manifest: WeightManifest) -> dict[str, torch.Tensor]:
        """Read a version and verify names, shapes, dtypes, count and digests.

        Raises:
            TransportFault: Anything differs from the manifest, or the version is gone.
        """
        ...

    def retire(self, version: int) -> None:
        """Free every version below `version`; unknown ones are ignored."""
        ...

    def close(self) -> None:
        """Free everything this transport published."""
        ...
