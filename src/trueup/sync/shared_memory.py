"""Versions in the machine's memory: a private directory of /dev/shm.

Its name follows from the run's directory, so that every process of a run finds the same one. Names
in /dev/shm are open to all users, hence the check of owner and mode before anything is written.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

from trueup.errors import TransportFault
from trueup.sync.directory import DirectoryTransport

_log = logging.getLogger(__name__)


class SharedMemoryTransport(DirectoryTransport):
    """Versions readable by this user alone; the publisher removes the directory with them.

    Args:
        root: Directory of the run; only its path matters.
        memory: A file system in memory; without it the temporary directory serves, with a warning.
    """

    def __init__(self, root: Path, memory: Path = Path("/dev/shm")) -> None:
        """Find the directory; the publisher makes it."""
        key = hashlib.blake2b(str(root.resolve()).encode(), digest_size=8).hexdigest()
        directory = _parent(memory) / f"trueup-{os.getuid()}-{key}"
        super().__init__("shared_memory", directory, durable=False)

    def close(self) -> None:
        """Free everything this transport published and, for a publisher, the directory."""
        super().close()
        if self._latest >= 0:
            shutil.rmtree(self.root, ignore_errors=True)

    def _claim(self) -> None:
        self.root.mkdir(mode=0o700, exist_ok=True)
        found = self.root.lstat()
        private = stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o700
        if not private or found.st_uid != os.getuid():
            raise TransportFault(
                field=str(self.root),
                rule=f"a directory of user {os.getuid()} with mode 0700",
                value=f"user {found.st_uid}, mode {stat.filemode(found.st_mode)}",
            )
        super()._claim()


def build(root: Path) -> SharedMemoryTransport:
    """The shared-memory transport of the run in directory `root`."""
    return SharedMemoryTransport(root)


def _parent(memory: Path) -> Path:
    if memory.is_dir() and os.access(memory, os.W_OK):
        return memory
    fallback = Path(tempfile.gettempdir())
    _log.warning(
        "%s is not writable: weights travel through %s, which may be a disk", memory, fallback
    )
    return fallback
