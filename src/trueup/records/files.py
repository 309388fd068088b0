"""Files that are whole or absent, and which kind of disk they lie on."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_NETWORK = frozenset(
    (
        *("9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4"),
        *("smb2", "smb3", "smbfs", "virtiofs"),
    )
)


def write_atomic(path: Path, data: bytes | memoryview) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, never a part.

    Written beside under a temporary name, flushed to the disk, then renamed.

    Args:
        path: Its directory exists.
        data: The whole content.

    Raises:
        OSError: The disk is full or refuses; the old content stays and nothing is left beside it.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    sync(path.parent)


def filesystem_type(path: Path, mounts: str | None = None) -> str:
    """Type of the file system that holds a path, as in `/proc/mounts`; "" if unknown.

    Args:
        path: Need not exist.
        mounts: Text of `/proc/mounts`; read from there if None.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text()
        except OSError:
            return ""
    target = path.resolve()
    best, kind = -1, ""
    for line in mounts.splitlines():
        _, point, found, *_ = line.split()
        # Blanks in a mount point are written as \040 and the like.
        place = Path(point.encode().decode("unicode_escape"))
        # A later mount on the same point hides the earlier one.
        if target.is_relative_to(place) and len(place.parts) >= best:
            best, kind = len(place.parts), found
    return kind


def on_network(path: Path, mounts: str | None = None) -> bool:
    """Whether a path lies on a network file system, where shared-memory locks do not reach."""
    kind = filesystem_type(path, mounts)
    return kind in _NETWORK or kind == "fuse" or kind.startswith("fuse.")


def sync(path: Path) -> None:
    """Make a file, or the renames in a directory, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
