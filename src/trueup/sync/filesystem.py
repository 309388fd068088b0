"""Versions in a directory of the run: durable, and shared by machines that share the disk."""

from __future__ import annotations

from pathlib import Path

from trueup.sync.directory import DirectoryTransport


def build(root: Path) -> DirectoryTransport:
    """A transport whose versions lie under `root`/weights."""
    return DirectoryTransport("filesystem", root / "weights", durable=True)
