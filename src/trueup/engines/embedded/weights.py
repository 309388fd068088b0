"""Two versions at most: the one that is served, and the next one, staged beside it.

A version is fetched, checked against the model, copied into memory of its own, made ready for the
forward, and the memory that the forward will read is digested; only a version whose digest is the
manifest's can be swapped in, by exchanging two references. Until then, and after any failure, the
old version is served as the old version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic

import torch
from torch import Tensor

from trueup.engines.embedded.network import P
from trueup.engines.embedded.parameters import Parameters, Spec, verify
from trueup.errors import EngineFault, TransportFault
from trueup.types import WeightManifest

Fetch = Callable[[WeightManifest], Mapping[str, Tensor]]
"""Reads a published version (`Transport.fetch`)."""
Digest = Callable[[Mapping[str, Tensor]], str]
"""Digest of named tensors, as the manifest holds it (`sync.digest.digest`)."""


class DoubleBuffer(Generic[P]):
    """Stages, verifies and swaps versions.

    Args:
        spec: What makes up the model.
        fused: Groups of names to stack (`Network.fused`).
        device: Where the parameters lie.
        prepare: Makes a version ready for the forward (`Network.prepare`).
        fetch: Reads a version.
        digest: Digests tensors.
    """

    def __init__(
        self,
        spec: Spec,
        fused: Iterable[Sequence[str]],
        device: torch.device,
        *,
        prepare: Callable[[Parameters], P],
        fetch: Fetch,
        digest: Digest,
    ) -> None:
        """Start empty."""
        self.version = -1
        """The version served; -1 before the first."""
        self.prepare_s = 0.0
        """What preparing the last staged version took."""
        self._prepare = prepare
        self._spec = spec
        self._fused = tuple(fused)
        self._device = device
        self._fetch = fetch
        self._digest = digest
        self._serving: P | None = None
        self._staged: tuple[int, P] | None = None

    @torch.no_grad()
    def stage(self, manifest: WeightManifest) -> str:
        """Make a version ready to be swapped in; may run while the served one is in use.

        Returns:
            The digest of the memory that will be read.

        Raises:
            TransportFault: The version does not fit the model or differs from its manifest.
        """
        self._staged = None
        tensors = self._fetch(manifest)
        verify(self._spec, tensors, version=manifest.version)
        own = Parameters(self._spec, self._fused, self._device)
        own.copy_from(tensors)
        begin = time.monotonic()
        prepared = self._prepare(own)
        self.prepare_s = time.monotonic() - begin
        found = self._digest(prepared.tensors())
        if found != manifest.digest:
            raise TransportFault(
                field=f"version {manifest.version}: digest of engine memory",
                rule=manifest.digest,
                value=found,
            )
        self._staged = (manifest.version, prepared)
        return found

    def swap(self) -> P:
        """Serve what was staged.

        Raises:
            EngineFault: Nothing verified is staged.
        """
        if self._staged is None:
            raise EngineFault(field="swap", rule="preceded by a verified stage", value="nothing")
        (self.version, self._serving), self._staged = self._staged, None
        return self._serving

    def close(self) -> None:
        """Let go of both versions."""
        self._serving = self._staged = None

    def attest(self) -> str:
        """Digest of the memory that is served now.

        Raises:
            EngineFault: Nothing is served yet.
        """
        if self._serving is None:
            raise EngineFault(field="engine", rule="serving a version", value="empty")
        return self._digest(self._serving.tensors())
