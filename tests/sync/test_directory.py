import logging
import os
import tempfile
from pathlib import Path

import pytest
import torch

from trueup.config import SyncConfig
from trueup.errors import ConfigError, TransportFault
from trueup.sync import filesystem
from trueup.sync.directory import MANIFEST, WEIGHTS, DirectoryTransport
from trueup.sync.shared_memory import SharedMemoryTransport
from trueup.sync.table import build, open_transport

TENSORS = {"w": torch.arange(1000.0)}


@pytest.fixture
def transport(tmp_path: Path) -> DirectoryTransport:
    return filesystem.build(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_refused(transport: DirectoryTransport, share: float) -> None:
    manifest = transport.publish(0, TENSORS)
    path = transport.version_directory(0) / WEIGHTS
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(TransportFault, match="version 0"):
        transport.fetch(manifest)


def test_every_flipped_byte_of_the_file_is_found(transport: DirectoryTransport) -> None:
    manifest = transport.publish(0, {"w": torch.arange(20.0)})
    path = transport.version_directory(0) / WEIGHTS
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        try:
            fetched = transport.fetch(manifest)
        except TransportFault:
            continue
        # only insignificant bytes of the header may differ, and then every tensor arrived whole
        assert position < 8 + int.from_bytes(whole[:8], "little")
        assert torch.equal(fetched["w"], torch.arange(20.0))


def test_a_version_without_its_manifest_is_not_whole(transport: DirectoryTransport) -> None:
    manifest = transport.publish(0, TENSORS)
    (transport.version_directory(0) / MANIFEST).unlink()
    with pytest.raises(TransportFault, match="published and whole"):
        transport.fetch(manifest)


def test_another_process_reads_with_its_own_transport(tmp_path: Path) -> None:
    for name in ("filesystem", "shared_memory"):
        publisher, reader = open_transport(name, tmp_path), open_transport(name, tmp_path)
        manifest = publisher.publish(0, TENSORS)
        assert torch.equal(reader.fetch(manifest)["w"], TENSORS["w"])
        reader.retire(10)
        reader.close()
        assert torch.equal(publisher.fetch(manifest)["w"], TENSORS["w"])
        publisher.close()


def test_a_failed_write_leaves_the_older_version_readable(transport: DirectoryTransport) -> None:
    manifest = transport.publish(0, TENSORS)
    transport.version_directory(1).write_text("in the way")
    with pytest.raises(TransportFault, match="version 1 must be writable"):
        transport.publish(1, TENSORS)
    assert torch.equal(transport.fetch(manifest)["w"], TENSORS["w"])
    assert transport.publish(2, TENSORS).version == 2


def test_a_version_that_does_not_fit_is_refused_before_it_is_written(
    transport: DirectoryTransport,
) -> None:
    transport.publish(0, TENSORS)
    with pytest.raises(
        TransportFault, match=r"free space of .* must be at least 9223372036854775807"
    ):
        transport._demand_space(2**63 - 1)


def test_a_publisher_clears_what_a_dead_one_left(tmp_path: Path) -> None:
    dead = filesystem.build(tmp_path)
    dead.publish(7, TENSORS)
    heir = filesystem.build(tmp_path)
    manifest = heir.publish(5, TENSORS)
    assert sorted(path.name for path in heir.root.iterdir()) == ["version-5"]
    assert heir.fetch(manifest)


def test_closing_removes_every_file(tmp_path: Path) -> None:
    for name in ("filesystem", "shared_memory"):
        transport = open_transport(name, tmp_path)
        assert isinstance(transport, DirectoryTransport)
        transport.publish(0, TENSORS)
        transport.publish(1, TENSORS)
        transport.close()
        assert not transport.root.exists() or not any(transport.root.iterdir())


def test_shared_memory_is_private_and_the_same_for_every_process_of_a_run(tmp_path: Path) -> None:
    first = SharedMemoryTransport(tmp_path / "run", tmp_path)
    assert first.root == SharedMemoryTransport(tmp_path / "run", tmp_path).root
    assert first.root != SharedMemoryTransport(tmp_path / "other", tmp_path).root
    assert not first.root.exists()
    first.publish(0, TENSORS)
    assert first.root.stat().st_mode & 0o777 == 0o700


def test_a_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    transport = SharedMemoryTransport(tmp_path / "run", tmp_path)
    transport.root.mkdir()
    transport.root.chmod(0o777)
    with pytest.raises(TransportFault, match="mode 0700"):
        transport.publish(0, TENSORS)


def test_a_link_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    transport = SharedMemoryTransport(tmp_path / "run", tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    transport.root.symlink_to(elsewhere)
    with pytest.raises(TransportFault, match="mode 0700"):
        transport.publish(0, TENSORS)
    assert not any(elsewhere.iterdir())


def test_without_shared_memory_the_temporary_directory_serves_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        transport = SharedMemoryTransport(tmp_path / "run", tmp_path / "missing")
    assert transport.root.parent == Path(tempfile.gettempdir())
    assert "missing is not writable" in caplog.text


def test_the_table_builds_what_the_configuration_names(tmp_path: Path) -> None:
    transport = build(SyncConfig(transport="filesystem"), tmp_path)
    assert transport.name == "filesystem"
    with pytest.raises(ConfigError, match=r"one of filesystem, inprocess, shared_memory"):
        open_transport("pigeon", tmp_path)
