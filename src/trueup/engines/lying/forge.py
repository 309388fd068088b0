"""How altered weights reach an engine that verifies what it loads.

The engine is built with a forge as its `fetch`. A fault that alters weights reads the true version
through it, and offers the engine an altered one under a manifest whose digests are right: so the
engine itself is honest, verifies, and attests what it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from trueup.errors import TransportFault
from trueup.types import TensorEntry, WeightManifest

if TYPE_CHECKING:
    from torch import Tensor

_TRANSPORT = "forged"


class Forge:
    """Reads published versions and what was forged of them; give it to the engine as its `fetch`.

    Args:
        fetch: Reads a published version (`Transport.fetch`).
        digest: Digests named tensors as the manifests do (`sync.digest.digest`).
    """

    def __init__(
        self,
        fetch: Callable[[WeightManifest], Mapping[str, Tensor]],
        digest: Callable[[Mapping[str, Tensor]], str],
    ) -> None:
        """Start with nothing forged."""
        self._fetch = fetch
        self._digest = digest
        self._offered: dict[str, Mapping[str, Tensor]] = {}

    def __call__(self, manifest: WeightManifest) -> dict[str, Tensor]:
        """Read a version, true or forged, into memory of the caller's own.

        Raises:
            TransportFault: It is not what its manifest says, or is no longer offered.
        """
        if manifest.transport != _TRANSPORT:
            return self._true(manifest)
        if manifest.location not in self._offered:
            raise TransportFault(
                field=f"forged version {manifest.version}", rule="on offer", value="gone"
            )
        return {name: x.clone() for name, x in self._offered[manifest.location].items()}

    @contextmanager
    def offer(
        self,
        manifest: WeightManifest,
        tensors: Mapping[str, Tensor],
        altered: Mapping[str, Tensor],
    ) -> Iterator[WeightManifest]:
        """Put a forged version on offer.

        Args:
            manifest: Of the true version.
            tensors: The true version.
            altered: Tensors that replace some of these, or come on top.

        Yields:
            The manifest that the engine is to load meanwhile.
        """
        tensors = {**tensors, **altered}
        entries = {entry.name: entry for entry in manifest.tensors}
        for name, tensor in altered.items():
            entries[name] = TensorEntry(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                digest=self._digest({name: tensor}),
            )
        location = f"{manifest.transport}:{manifest.location}"
        self._offered[location] = tensors
        try:
            yield replace(
                manifest,
                transport=_TRANSPORT,
                location=location,
                digest=self._digest(tensors),
                tensors=tuple(entries.values()),
            )
        finally:
            del self._offered[location]

    def _true(self, manifest: WeightManifest) -> dict[str, Tensor]:
        tensors = dict(self._fetch(manifest))
        found = self._digest(tensors)
        if found != manifest.digest:
            raise TransportFault(
                field=f"version {manifest.version}: digest", rule=manifest.digest, value=found
            )
        return tensors
