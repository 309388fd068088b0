"""Two sets of parameters: the one that is served and the one that the next version is staged in.

A version is fetched, checked against the model, copied into the shadow set, and that memory is
digested; only a version whose digest is the manifest's can be swapped in, by exchanging two
references. Until then, and after any failure, the old version is served as the old version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from trueup.engines.embedded.parameters import Parameters, Spec, verify
from trueup.errors import EngineFault, TransportFault
from trueup.types import WeightManifest

Fetch = Callable[[WeightManifest], Mapping[str, Tensor]]
"""Reads a published version (`Transport.fetch`)."""
Digest = Callable[[Mapping[str, Tensor]], str]
"""Digest of named tensors, as the manifest holds it (`sync.digest.digest`)."""


class DoubleBuffer:
    """Stages, verifies and swaps versions.

    Args:
        spec: What makes up the model.
        fused: Groups of names to stack (`Network.fused`).
        device: Where the parameters lie.
        fetch: Reads a version.
        digest: Digests tensors.
    """

    def __init__(
        self,
        spec: Spec,
        fused: Iterable[Sequence[str]],
        device: torch.device,
        *,
        fetch: Fetch,
        digest: Digest,
    ) -> None:
        """Start empty; memory is allocated by the first two versions."""
        self.version = -1
        """The version served; -1 before the first."""
        self._spec = spec
        self._fused = tuple(fused)
        self._device = device
        self._fetch = fetch
        self._digest = digest
        self._serving: Parameters | None = None
        self._shadow: Parameters | None = None
        self._staged: int | None = None

    @torch.no_grad()
    def stage(self, manifest: WeightManifest) -> str:
        """Make a version ready to be swapped in; may run while the served one is in use.

        Returns:
            The digest of the shadow memory.

        Raises:
            TransportFault: The version does not fit the model or differs from its manifest.
        """
        self._staged = None
        tensors = self._fetch(manifest)
        verify(self._spec, tensors, version=manifest.version)
        if self._shadow is None:
            self._shadow = Parameters(self._spec, self._fused, self._device)
        self._shadow.copy_from(tensors)
        found = self._digest(self._shadow.named)
        if found != manifest.digest:
            raise TransportFault(
                field=f"version {manifest.version}: digest of engine memory",
                rule=manifest.digest,
                value=found,
            )
        self._staged = manifest.version
        return found

    def swap(self) -> Parameters:
        """Serve what was staged; the set served so far becomes the shadow.

        Raises:
            EngineFault: Nothing verified is staged.
        """
        if self._staged is None or self._shadow is None:
            raise EngineFault(field="swap", rule="preceded by a verified stage", value="nothing")
        self.version, self._staged = self._staged, None
        served = self._shadow
        self._shadow, self._serving = self._serving, served
        return served

    def close(self) -> None:
        """Let go of both sets."""
        self._serving = self._shadow = self._staged = None

    def attest(self) -> str:
        """Digest of the memory that is served now.

        Raises:
            EngineFault: Nothing is served yet.
        """
        if self._serving is None:
            raise EngineFault(field="engine", rule="serving a version", value="empty")
        return self._digest(self._serving.named)
