"""What every transport must do, run over every line of the table."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trueup.errors import TransportFault
from trueup.sync.base import Transport
from trueup.sync.directory import WEIGHTS, DirectoryTransport
from trueup.sync.inprocess import InProcessTransport
from trueup.sync.table import TRANSPORTS, open_transport
from trueup.types import WeightManifest

Tensors = dict[str, torch.Tensor]


@pytest.fixture(params=sorted(TRANSPORTS))
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Transport]:
    opened = open_transport(request.param, tmp_path)
    yield opened
    opened.close()


def weights(fill: float = 1.0) -> Tensors:
    return {
        "embedding": torch.full((7, 5), fill),
        "half": torch.full((33,), fill).to(torch.bfloat16),
        "quantized": torch.arange(-8, 8, dtype=torch.int8),
        "none": torch.empty(0, 4),
        "scale": torch.tensor(fill),
    }


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(
            a.contiguous().reshape(-1).view(torch.uint8),
            b.contiguous().reshape(-1).view(torch.uint8),
        )
    )


def tamper(transport: Transport, manifest: WeightManifest, damage: Callable[[Tensors], None]):
    """Change what lies in storage, behind the transport's back."""
    if isinstance(transport, InProcessTransport):
        damage(transport.versions[manifest.version])
        return
    assert isinstance(transport, DirectoryTransport)
    path = transport.version_directory(manifest.version) / WEIGHTS
    stored = {name: tensor.clone() for name, tensor in load_file(path).items()}
    damage(stored)
    save_file(stored, path)


def test_what_is_fetched_is_what_was_published_bit_for_bit(transport: Transport) -> None:
    published = weights(0.1) | {"special": torch.tensor([float("nan"), -0.0, float("inf")])}
    fetched = transport.fetch(transport.publish(0, published))
    assert fetched.keys() == published.keys()
    assert all(same_bits(fetched[name], published[name]) for name in published)


def test_views_and_tied_tensors_travel(transport: Transport) -> None:
    shared = torch.arange(12.0).reshape(3, 4)
    fetched = transport.fetch(transport.publish(0, {"a": shared, "b": shared, "t": shared.t()}))
    assert torch.equal(fetched["b"], shared)
    assert torch.equal(fetched["t"], shared.t())


def flip_a_bit(stored: Tensors) -> None:
    stored["half"].view(torch.uint8)[40] ^= 4


def drop(stored: Tensors) -> None:
    del stored["scale"]


def add(stored: Tensors) -> None:
    stored["surplus"] = torch.zeros(1)


def reshape(stored: Tensors) -> None:
    stored["embedding"] = stored["embedding"].reshape(5, 7).contiguous()


def retype(stored: Tensors) -> None:
    stored["quantized"] = stored["quantized"].view(torch.uint8)


def swap_names(stored: Tensors) -> None:
    stored["quantized"][[0, 1]] = stored["quantized"][[1, 0]]


@pytest.mark.parametrize(
    ("damage", "tensor", "rule"),
    [
        (flip_a_bit, "half", "of digest"),
        (drop, "scale", "present"),
        (add, "surplus", "absent"),
        (reshape, "embedding", r"of shape \(7, 5\)"),
        (retype, "quantized", "of dtype int8"),
        (swap_names, "quantized", "of digest"),
    ],
)
def test_damage_in_transit_is_found_and_named(
    transport: Transport, damage: Callable[[Tensors], None], tensor: str, rule: str
) -> None:
    manifest = transport.publish(4, weights())
    tamper(transport, manifest, damage)
    with pytest.raises(TransportFault, match=f"version 4: {tensor} must be {rule}"):
        transport.fetch(manifest)


def test_a_mixture_of_two_versions_is_refused(transport: Transport) -> None:
    """Case V7: two versions mixed; a missing tensor is `drop` above."""
    transport.publish(1, weights(1.0))
    newer = transport.publish(2, weights(2.0))
    tamper(transport, newer, lambda stored: stored.update(scale=torch.tensor(1.0)))
    with pytest.raises(TransportFault, match="version 2: scale"):
        transport.fetch(newer)


@pytest.mark.parametrize("version", [5, 4, -1])
def test_a_version_that_is_not_newer_is_refused(transport: Transport, version: int) -> None:
    manifest = transport.publish(5, weights(5.0))
    with pytest.raises(TransportFault, match="greater than 5"):
        transport.publish(version, weights(6.0))
    assert transport.fetch(manifest)["scale"] == 5.0


def test_a_negative_version_is_refused(transport: Transport) -> None:
    with pytest.raises(TransportFault, match="greater than -1"):
        transport.publish(-1, weights())


def test_a_version_that_never_arrived_is_refused_and_the_older_one_stays(
    transport: Transport,
) -> None:
    """Case V7: weights never arrive."""
    older = transport.publish(1, weights(1.0))
    announced = replace(older, version=2, location=older.location.replace("version-1", "version-2"))
    with pytest.raises(TransportFault, match="version 2 must be published"):
        transport.fetch(announced)
    assert transport.fetch(older)["scale"] == 1.0


def test_an_empty_version_is_refused(transport: Transport) -> None:
    with pytest.raises(TransportFault, match="at least one"):
        transport.publish(0, {})


def test_updating_the_live_tensors_does_not_change_what_was_published(
    transport: Transport,
) -> None:
    """Case V9: a copy that aliases the live model."""
    live = weights(1.0)
    manifest = transport.publish(0, live)
    for tensor in live.values():
        tensor.add_(1)
    assert transport.fetch(manifest)["scale"] == 1.0


def test_a_reader_cannot_change_what_the_next_reader_gets(transport: Transport) -> None:
    manifest = transport.publish(0, weights(1.0))
    for tensor in transport.fetch(manifest).values():
        tensor.add_(1)
    assert transport.fetch(manifest)["scale"] == 1.0


def test_fetched_tensors_outlive_their_version(transport: Transport) -> None:
    fetched = transport.fetch(transport.publish(0, weights(1.0)))
    transport.publish(1, weights(2.0))
    transport.retire(1)
    assert torch.equal(fetched["embedding"], torch.ones(7, 5))


def test_changed_elements_are_counted_against_the_version_before(transport: Transport) -> None:
    tensors = weights(1.0)
    assert transport.publish(0, tensors).n_changed == 35 + 33 + 16 + 0 + 1
    tensors["embedding"][2, 1:4] = 9.0
    tensors["quantized"][0] = 0
    assert transport.publish(1, tensors).n_changed == 4


def test_an_update_too_small_for_the_dtype_is_a_hidden_update(transport: Transport) -> None:
    """Case V10: the learning rate is too small for bfloat16."""
    master = torch.full((100,), 1.0)
    transport.publish(0, {"w": master.to(torch.bfloat16)})
    master += 1e-4  # bfloat16 next to 1.0 moves in steps of 2^-7
    manifest = transport.publish(1, {"w": master.to(torch.bfloat16)})
    assert (manifest.version, manifest.n_changed) == (1, 0)


def test_retired_versions_are_gone_and_later_ones_stay(transport: Transport) -> None:
    manifests = [transport.publish(version, weights(version)) for version in (1, 2, 5)]
    transport.retire(5)
    transport.retire(3)
    for old in manifests[:2]:
        with pytest.raises(TransportFault, match=f"version {old.version}"):
            transport.fetch(old)
    assert transport.fetch(manifests[2])["scale"] == 5.0


def test_a_manifest_of_another_place_is_refused(transport: Transport) -> None:
    manifest = transport.publish(0, weights())
    with pytest.raises(TransportFault, match="location"):
        transport.fetch(replace(manifest, location="/etc"))
    with pytest.raises(TransportFault, match="transport"):
        transport.fetch(replace(manifest, transport="carrier pigeon"))


def test_a_closed_transport_does_nothing_and_closes_again(transport: Transport) -> None:
    manifest = transport.publish(0, weights())
    transport.close()
    transport.close()
    with pytest.raises(TransportFault, match="open"):
        transport.fetch(manifest)
    with pytest.raises(TransportFault, match="open"):
        transport.publish(1, weights())


def test_a_concurrent_reader_sees_one_version_whole_and_never_two(transport: Transport) -> None:
    """The reader may find that a version was retired meanwhile; it may never find a mixture."""

    def version_tensors(version: int) -> Tensors:
        return {f"layer.{i}": torch.full((5000,), float(version)) for i in range(8)}

    current = [transport.publish(0, version_tensors(0))]
    mixed: list[str] = []
    reads = 0
    stop = threading.Event()

    def read() -> None:
        nonlocal reads
        while not stop.is_set():
            manifest = current[0]
            try:
                fetched = transport.fetch(manifest)
            except TransportFault as fault:
                if "published" not in fault.rule:
                    mixed.append(fault.message)
                continue
            seen = {float(value) for tensor in fetched.values() for value in tensor.unique()}
            reads += 1
            if seen != {float(manifest.version)}:
                mixed.append(f"{manifest.version}: {seen}")

    reader = threading.Thread(target=read)
    reader.start()
    version = 0
    while version < 30 or reads < 10:
        version += 1
        current[0] = transport.publish(version, version_tensors(version))
        transport.retire(version - 1)
    stop.set()
    reader.join()
    assert mixed == []
