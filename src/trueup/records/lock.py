"""One controller per run directory.

The lock is the operating system's and dies with its holder, so that a file left by a killed
controller is no obstacle; the text in the file only tells a second controller whom it met. POSIX
record locks are used because a forked child does not inherit them: a worker that outlives its
controller cannot keep the directory locked.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from trueup.errors import RunDirectoryError

# A process does not conflict with its own record locks, and closing any descriptor of the file
# would release them: what this process holds is therefore known here, as path -> pid.
_held: dict[Path, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds a run directory."""

    pid: int
    host: str
    started: float
    """Wall-clock time of the acquisition, seconds since the epoch."""


class RunLock:
    """Exclusive hold of a lock file until `release` or the end of the process.

    Args:
        path: The lock file; created if missing, never deleted.

    Raises:
        RunDirectoryError: Somebody else holds it; names the holder's pid and host.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()
        pid = os.getpid()
        if _held.get(self._path) == pid:
            raise _in_use(self._path, f"pid {pid} on {socket.gethostname()}, this process")
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = _describe(self._descriptor)
            os.close(self._descriptor)
            raise _in_use(self._path, holder) from None
        _held[self._path] = pid
        self.holder = Holder(pid=pid, host=socket.gethostname(), started=time.time())
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(asdict(self.holder)).encode(), 0)

    def release(self) -> None:
        """Let go; a second call does nothing."""
        if _held.get(self._path) == self.holder.pid == os.getpid():
            del _held[self._path]
            os.close(self._descriptor)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def _describe(descriptor: int) -> str:
    """The holder in words, as far as the file tells."""
    try:
        record = json.loads(os.pread(descriptor, 4096, 0))
        return f"pid {record['pid']} on {record['host']}"
    except (ValueError, KeyError, TypeError):
        # The holder has locked the file and not yet written who it is.
        return "another process"


def _in_use(path: Path, holder: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"run directory {path.parent} is in use by {holder}",
        field="run",
        rule="a directory that no other controller holds",
        value=holder,
    )
