"""Versions as directories: `version-N/weights.safetensors` first, `MANIFEST.json` last.

A version directory without a manifest is not whole and is never read. Publisher and readers may be
different processes: each opens the same directory, and only manifests travel between them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trueup.errors import TransportFault
from trueup.sync.manifest import manifest_as_dict, manifest_from_dict
from trueup.sync.verified import VerifiedTransport
from trueup.types import WeightManifest

if TYPE_CHECKING:
    import torch

WEIGHTS = "weights.safetensors"
MANIFEST = "MANIFEST.json"


class DirectoryTransport(VerifiedTransport):
    """Versions under one directory.

    Args:
        name: Name of the transport in manifests.
        root: The directory, made when first needed; it belongs to one publisher at a time.
        durable: Whether a published version survives a power cut (fsync), or lies in memory anyway.
    """

    def __init__(self, name: str, root: Path, *, durable: bool) -> None:
        """Open the directory; nothing in it is touched before the first publication."""
        super().__init__()
        self.name = name
        self.root = root.absolute()
        self.durable = durable

    def version_directory(self, version: int) -> Path:
        """Where a version's two files lie."""
        return self.root / f"version-{version}"

    def _location(self, version: int) -> str:
        return str(self.version_directory(version))

    def _write(self, manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        directory = self.version_directory(manifest.version)
        try:
            if not self._published:
                self._claim()
            self._demand_space(manifest.nbytes)
            directory.mkdir()
            save_file(dict(tensors), directory / WEIGHTS)
            self._sync(directory / WEIGHTS)
            self._write_manifest(directory, manifest)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise TransportFault(
                field=f"version {manifest.version}", rule="writable", value=str(error)
            ) from error

    def _write_manifest(self, directory: Path, manifest: WeightManifest) -> None:
        beside = directory / f"{MANIFEST}.tmp"
        beside.write_text(json.dumps(manifest_as_dict(manifest), indent=1))
        self._sync(beside)
        beside.rename(directory / MANIFEST)
        self._sync(directory)
        self._sync(self.root)

    def _read(self, manifest: WeightManifest) -> dict[str, torch.Tensor]:
        directory = self.version_directory(manifest.version)
        field = f"version {manifest.version}"
        try:
            written = manifest_from_dict(json.loads((directory / MANIFEST).read_bytes()))
            if written != manifest:
                raise TransportFault(
                    field=field, rule=f"of digest {manifest.digest}", value=written.digest
                )
            with safe_open(directory / WEIGHTS, framework="pt") as file:
                # clone: the file's pages stay shared with whoever can write it, after verification
                return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        except (OSError, ValueError, SafetensorError) as error:
            raise TransportFault(
                field=field, rule="published and whole", value=str(error)
            ) from error

    def _remove(self, version: int) -> None:
        directory = self.version_directory(version)
        # The manifest goes first: who comes now finds no version rather than half of one.
        (directory / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(directory, ignore_errors=True)

    def _claim(self) -> None:
        """Make the directory this publisher's own: free what one that died here left behind."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for directory in self.root.glob("version-*"):
            shutil.rmtree(directory)

    def _demand_space(self, nbytes: int) -> None:
        free = shutil.disk_usage(self.root).free
        if free < nbytes:
            raise TransportFault(
                field=f"free space of {self.root}", rule=f"at least {nbytes} bytes", value=free
            )

    def _sync(self, path: Path) -> None:
        if self.durable:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
