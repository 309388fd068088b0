"""The part of a transport that does not depend on where the bytes go.

Publishing copies the caller's live tensors once, so that a later update in place cannot reach what
was published; fetching verifies everything it read. A place of storage supplies `_write`, `_read`,
`_remove` and `_location`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from trueup.errors import TransportFault
from trueup.sync import manifest as manifests
from trueup.types import WeightManifest


class VerifiedTransport(ABC):
    """Publishes whole versions that only grow, and serves nothing unverified."""

    name: str
    atomic = True

    def __init__(self) -> None:
        """Start with nothing published."""
        self._published: set[int] = set()
        self._latest = -1
        self._latest_tensors: dict[str, torch.Tensor] = {}
        self._closed = False

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> WeightManifest:
        """Write a version whole.

        Args:
            version: Greater than every version published before.
            tensors: The weights, on any device.

        Returns:
            The manifest; `n_changed` compares with the version published before.

        Raises:
            TransportFault: The version is not newer, there is nothing to publish, the transport is
                closed, or the write failed; what was published before stays readable.
        """
        self._demand_open()
        if version <= self._latest:
            raise TransportFault(
                field="version", rule=f"greater than {self._latest}, the last one", value=version
            )
        if not tensors:
            raise TransportFault(field="tensors", rule="at least one", value=0)
        copies = {name: _private_copy(tensors[name]) for name in sorted(tensors)}
        manifest = manifests.describe(
            version,
            copies,
            self._latest_tensors,
            transport=self.name,
            location=self._location(version),
        )
        self._write(manifest, copies)
        self._published.add(version)
        self._latest = version
        self._latest_tensors = copies
        return manifest

    def fetch(self, manifest: WeightManifest) -> dict[str, torch.Tensor]:
        """Read a version into memory of the caller's own and verify it.

        Raises:
            TransportFault: The manifest is another transport's, the version is gone, or anything
                read differs from the manifest.
        """
        self._demand_open()
        for field, expected, found in (
            ("transport", self.name, manifest.transport),
            ("location", self._location(manifest.version), manifest.location),
        ):
            if found != expected:
                raise TransportFault(field=f"manifest.{field}", rule=repr(expected), value=found)
        tensors = self._read(manifest)
        manifests.verify(manifest, tensors)
        return tensors

    def retire(self, version: int) -> None:
        """Free every version below `version` that this transport published."""
        for old in sorted(v for v in self._published if v < version):
            self._remove(old)
            self._published.discard(old)

    def close(self) -> None:
        """Free everything this transport published; may be called twice."""
        self.retire(self._latest + 1)
        self._latest_tensors = {}
        self._closed = True

    def _demand_open(self) -> None:
        if self._closed:
            raise TransportFault(field="transport", rule="open", value="closed")

    @abstractmethod
    def _location(self, version: int) -> str:
        """Where a version lies."""

    @abstractmethod
    def _write(self, manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Store a version so that a reader sees all of it or none of it."""

    @abstractmethod
    def _read(self, manifest: WeightManifest) -> dict[str, torch.Tensor]:
        """Copies of a version's tensors, not yet verified."""

    @abstractmethod
    def _remove(self, version: int) -> None:
        """Free a version."""


def _private_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return copy.copy_(tensor.detach())
