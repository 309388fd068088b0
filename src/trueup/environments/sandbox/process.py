"""Drive one child process: bounded output, a deadline on the host's clock, a memory watchdog."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_TICK_S = 0.1
_CHUNK = 65536
_REAP_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a child process ended and what it wrote."""

    stdout: bytes
    stderr: bytes
    timed_out: bool
    truncated: bool
    out_of_memory: bool
    seconds: float


def sealed(data: bytes) -> BinaryIO:
    """An anonymous file that holds `data`, positioned at its start.

    A child can inherit and read it; on Linux nobody can change it any more.
    """
    if not hasattr(os, "memfd_create"):
        file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        file.write(data)
        file.seek(0)
        return file
    import fcntl  # not on every system that reads this module

    file = os.fdopen(os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+b")
    file.write(data)
    file.flush()
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    file.seek(0)
    return file


def supervise(
    process: subprocess.Popen[bytes],
    *,
    started: float,
    deadline_s: float,
    output_bytes: int,
    memory_bytes: int,
    kill: Callable[[], None],
    root: Callable[[], int | None],
) -> Outcome:
    """Read a process until it ends; kill it at the first broken bound; always reap it.

    Args:
        process: Child with pipes for stdout and stderr.
        started: `time.monotonic()` at launch.
        deadline_s: Seconds after `started`.
        output_bytes: Bound of stdout and stderr together.
        memory_bytes: Bound of the resident memory of `root` and below, sampled every 0.1 s.
        kill: Ends the process and everything it started; called at the end too.
        root: Process whose tree is measured; None while it is unknown.
    """
    timed_out = out_of_memory = False
    sampled = started
    with _Streams(process, output_bytes) as streams:
        while process.poll() is None:
            now = time.monotonic()
            timed_out = now >= started + deadline_s
            if now >= sampled + _TICK_S:
                sampled = now
                out_of_memory = resident_bytes(root()) > memory_bytes
            if timed_out or out_of_memory or streams.overflowed:
                break
            wait_s = min(_TICK_S, started + deadline_s - now)
            if streams.open:
                streams.pump(wait_s)
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(wait_s)
        kill()
        try:
            process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        while not streams.overflowed and streams.pump(0):
            pass
        return Outcome(
            stdout=bytes(streams.stdout),
            stderr=bytes(streams.stderr),
            timed_out=timed_out,
            truncated=streams.overflowed,
            out_of_memory=out_of_memory,
            seconds=time.monotonic() - started,
        )


def resident_bytes(root: int | None) -> int:
    """Resident memory of a process and its descendants (Linux; 0 elsewhere and for None).

    Pages that several of them share count once for each: an upper bound.
    """
    if root is None:
        return 0
    pages: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # The command in field 2 may hold spaces and brackets: split after its last bracket.
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(entry.name)
        children.setdefault(int(fields[1]), []).append(pid)
        pages[pid] = int(fields[21])
    total, tree = 0, [root]
    while tree:
        pid = tree.pop()
        total += pages.get(pid, 0)
        tree.extend(children.get(pid, ()))
    return total * os.sysconf("SC_PAGE_SIZE")


class _Streams:
    """stdout and stderr of a process, read into memory up to a common bound."""

    def __init__(self, process: subprocess.Popen[bytes], limit: int) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.stdout, self.stderr = bytearray(), bytearray()
        self.overflowed = False
        self._room = limit
        self._selector = selectors.DefaultSelector()
        self._selector.register(process.stdout, selectors.EVENT_READ, self.stdout)
        self._selector.register(process.stderr, selectors.EVENT_READ, self.stderr)
        self._pipes = (process.stdout, process.stderr)

    def __enter__(self) -> _Streams:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for pipe in self._pipes:
            pipe.close()

    @property
    def open(self) -> bool:
        """Whether anybody can still write."""
        return bool(self._selector.get_map())

    def pump(self, wait_s: float) -> bool:
        """Take what is there or comes within `wait_s`; False if nothing came."""
        came = False
        for key, _ in self._selector.select(wait_s):
            chunk = os.read(key.fd, _CHUNK)
            if not chunk:
                self._selector.unregister(key.fileobj)
                continue
            came = True
            kept = chunk[: self._room]
            key.data.extend(kept)
            self._room -= len(kept)
            self.overflowed |= len(kept) < len(chunk)
        return came
