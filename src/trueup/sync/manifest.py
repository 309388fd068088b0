"""What a published version consists of: made, verified, written and read in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trueup.errors import TransportFault
from trueup.sync.digest import lanes, merge, tensor_digest
from trueup.types import TensorEntry, WeightManifest

if TYPE_CHECKING:
    import torch


def describe(
    version: int,
    tensors: Mapping[str, torch.Tensor],
    previous: Mapping[str, torch.Tensor],
    *,
    transport: str,
    location: str,
) -> WeightManifest:
    """Make the manifest of a version.

    Args:
        version: Its number.
        tensors: What it consists of.
        previous: The version before, for the count of changed elements; empty for the first.
        transport: Name of the transport.
        location: Where the transport will find it.
    """
    digests = {name: tensor_digest(name, tensor) for name, tensor in tensors.items()}
    return WeightManifest(
        version=version,
        transport=transport,
        location=location,
        digest=merge(digests.values()),
        tensors=tuple(
            TensorEntry(
                name=name,
                dtype=_dtype(tensor),
                shape=tuple(tensor.shape),
                digest=merge([digests[name]]),
            )
            for name, tensor in tensors.items()
        ),
        nbytes=sum(tensor.nbytes for tensor in tensors.values()),
        n_changed=sum(count_changed(tensors[name], previous.get(name)) for name in tensors),
    )


def count_changed(tensor: torch.Tensor, previous: torch.Tensor | None) -> int:
    """Number of elements whose bits differ from the version before; all, if it had none such."""
    if previous is None or previous.dtype != tensor.dtype or previous.shape != tensor.shape:
        return tensor.numel()
    if not tensor.numel():
        return 0
    differs = lanes(tensor) != lanes(previous)
    return int(differs.view(tensor.numel(), -1).any(1).sum())


def verify(manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that are not, bit for bit, what the manifest says.

    Raises:
        TransportFault: Names, count, a shape, a dtype, a digest or the total differs; `field` names
            the tensor.
    """
    prefix = f"version {manifest.version}"
    expected = {entry.name: entry for entry in manifest.tensors}
    if len(expected) != len(manifest.tensors):
        raise TransportFault(
            field=f"{prefix}: tensors", rule="named once each", value=len(manifest.tensors)
        )
    for name in sorted(expected.keys() - tensors.keys()):
        raise TransportFault(field=f"{prefix}: {name}", rule="present", value="nothing")
    for name in sorted(tensors.keys() - expected.keys()):
        raise TransportFault(
            field=f"{prefix}: {name}", rule="absent", value="a tensor that the manifest lacks"
        )
    digests = []
    for name, entry in expected.items():
        tensor = tensors[name]
        _demand(f"{prefix}: {name}", "of shape", entry.shape, tuple(tensor.shape))
        _demand(f"{prefix}: {name}", "of dtype", entry.dtype, _dtype(tensor))
        found = tensor_digest(name, tensor)
        _demand(f"{prefix}: {name}", "of digest", entry.digest, merge([found]))
        digests.append(found)
    _demand(f"{prefix}: all tensors", "of digest", manifest.digest, merge(digests))


def manifest_as_dict(manifest: WeightManifest) -> dict[str, Any]:
    """The manifest as a JSON object."""
    record = asdict(manifest)
    record["tensors"] = [{**entry, "shape": list(entry["shape"])} for entry in record["tensors"]]
    return record


def manifest_from_dict(record: Mapping[str, Any]) -> WeightManifest:
    """Read a manifest back.

    Raises:
        TransportFault: A key is missing, unknown or of another type.
    """
    try:
        entries = tuple(
            TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in record["tensors"]
        )
        return WeightManifest(**{**record, "tensors": entries})
    except (KeyError, TypeError) as error:
        raise TransportFault(
            field="manifest", rule="a complete weight manifest", value=str(error)
        ) from error


def _demand(field: str, rule: str, expected: object, found: object) -> None:
    if found != expected:
        raise TransportFault(field=field, rule=f"{rule} {expected}", value=found)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
