"""Versions kept in this process's memory: for an engine in a thread, and for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trueup.errors import TransportFault
from trueup.sync.verified import VerifiedTransport
from trueup.types import WeightManifest

if TYPE_CHECKING:
    import torch


class InProcessTransport(VerifiedTransport):
    """Reads are copies, so that a reader cannot change what the next one gets."""

    name = "inprocess"

    def __init__(self) -> None:
        """Start with nothing published."""
        super().__init__()
        self.versions: dict[int, dict[str, torch.Tensor]] = {}

    def _location(self, version: int) -> str:
        return f"version-{version}"

    def _write(self, manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        self.versions[manifest.version] = dict(tensors)

    def _read(self, manifest: WeightManifest) -> dict[str, torch.Tensor]:
        stored = self.versions.get(manifest.version)
        if stored is None:
            raise TransportFault(
                field=f"version {manifest.version}", rule="published and not retired", value="gone"
            )
        return {name: tensor.clone() for name, tensor in stored.items()}

    def _remove(self, version: int) -> None:
        self.versions.pop(version, None)


def build(root: Path) -> InProcessTransport:
    """A transport of this process; it needs no directory, so `root` is not touched."""
    return InProcessTransport()
