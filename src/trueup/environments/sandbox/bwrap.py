"""Bubblewrap: namespaces without network, a read-only system, sized scratch space, limits.

Two variants of one recipe. With root, every live sandbox has a user id of its own (`bwrap`).
Without, bubblewrap makes a user namespace of the caller's id (`bwrap-user`), which is weaker:
before Linux 5.14 the process limit counts all processes of the user, inside the sandbox and out;
and the program runs under the id that owns the user's files, though it can see none of them. As
root that variant is refused, because the kernel does not limit root's processes.
Both share the host's kernel.

The program is process 1 of its own namespace, so that its death ends every process there, and
bubblewrap reaps it before it ends itself: nothing is left behind, in particular no zombie.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from trueup.environments.sandbox.base import ExecResult, Limits
from trueup.environments.sandbox.process import sealed, supervise
from trueup.environments.sandbox.seccomp import bpf_filter
from trueup.environments.sandbox.uids import UidPool
from trueup.errors import EnvironmentFault

INTERPRETER = "/usr/bin/python3"
_PATH = "/usr/bin:/bin"
_RETRY_WAITS_S = (0.05, 0.2, 0.5)
_PID_WAIT_S = 1.0


class BwrapSandbox:
    """A fresh bubblewrap per program.

    Args:
        uids: Pool of user ids, one per live sandbox; needs root. None: the caller's own id.
        limits: What one program may use.
    """

    def __init__(self, *, uids: UidPool | None, limits: Limits | None = None) -> None:
        self.kind = "bwrap-user" if uids is None else "bwrap"
        self._uids = uids
        self._limits = limits or Limits()
        self._filter = bpf_filter()
        self._closed = False
        owner = "the caller's user id" if uids is None else "a user id of its own"
        calls = "system calls filtered" if self._filter else "system calls NOT filtered: no seccomp"
        self.description = f"bubblewrap, {owner}, {calls}, kernel shared with the host"

    def exec(self, program: str, stdin: str, *, deadline_s: float) -> ExecResult:
        """Run a Python program; see `Sandbox.exec`."""
        message = ""
        for wait_s in (0.0, *_RETRY_WAITS_S):
            if self._closed:
                raise EnvironmentFault(field="closed", rule="an open sandbox", value=self.kind)
            time.sleep(wait_s)
            with self._uids.lend() if self._uids else contextlib.nullcontext() as uid:
                try:
                    result = self._attempt(program, stdin, uid=uid, deadline_s=deadline_s)
                except OSError as error:
                    result = str(error)
            if isinstance(result, ExecResult):
                return result
            message = result
        raise EnvironmentFault(
            f"bubblewrap did not start: {message.strip()[-300:]}", field="start", value=message
        )

    def close(self) -> None:
        """Refuse further programs."""
        self._closed = True

    def _attempt(
        self, program: str, stdin: str, *, uid: int | None, deadline_s: float
    ) -> ExecResult | str:
        """One launch: what the program did, or why it never ran."""
        with contextlib.ExitStack() as stack:
            main = stack.enter_context(sealed(program.encode()))
            given = stack.enter_context(sealed(stdin.encode()))
            inherited = [main.fileno()]
            options: list[str] = []
            if self._filter:
                filter_ = stack.enter_context(sealed(self._filter))
                inherited.append(filter_.fileno())
                options += ["--seccomp", str(filter_.fileno())]
            status, status_out = stack.enter_context(_pipe())
            inherited.append(status_out.fileno())
            options += ["--ro-bind-data", str(main.fileno()), "/box/main.py"]
            options += ["--json-status-fd", str(status_out.fileno())]
            started = time.monotonic()
            process = subprocess.Popen(
                self._command(options, uid=uid, deadline_s=deadline_s),
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},
                pass_fds=inherited,
            )
            status_out.close()
            inmate = _Inmate(process, status)
            outcome = supervise(
                process,
                started=started,
                deadline_s=deadline_s,
                output_bytes=self._limits.output_bytes,
                memory_bytes=self._limits.memory_bytes,
                kill=inmate.kill,
                root=lambda: inmate.pid,
            )
            exit_code = inmate.exit_code()
        stderr = outcome.stderr.decode(errors="replace")
        if exit_code is None:
            return stderr or f"no word from it within {outcome.seconds:.1f} s"
        if outcome.out_of_memory:
            stderr += f"\nkilled: more than {self._limits.memory_bytes} bytes of memory"
        return ExecResult(
            stdout=outcome.stdout.decode(errors="replace"),
            stderr=stderr,
            exit_code=exit_code,
            timed_out=outcome.timed_out,
            truncated=outcome.truncated,
            seconds=outcome.seconds,
        )

    def _command(self, options: list[str], *, uid: int | None, deadline_s: float) -> list[str]:
        limits = self._limits
        prlimit = [
            "prlimit",
            f"--nproc={limits.processes}",
            f"--as={limits.process_bytes}",
            f"--fsize={limits.disk_bytes}",
            f"--cpu={math.ceil(deadline_s) + 1}",
            f"--nofile={limits.open_files}",
            "--core=0",
            "--",
        ]
        bwrap = [
            "bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--as-pid-1",
            "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox",
            "--clearenv", "--setenv", "PATH", _PATH, "--setenv", "HOME", "/box",
            "--setenv", "LANG", "C.UTF-8",
            *_system_mounts(), "--proc", "/proc", "--dev", "/dev",
            "--size", str(limits.disk_bytes // 2), "--tmpfs", "/dev/shm",
            "--size", str(limits.disk_bytes), "--tmpfs", "/tmp",
            "--size", str(limits.disk_bytes), "--tmpfs", "/box",
            *options, "--chdir", "/box",
            "--remount-ro", "/dev", "--remount-ro", "/",  # "/" last: nothing mounts after it
        ]  # fmt: skip
        python = [INTERPRETER, "-I", "-S", "-B", "main.py"]
        clean = ["/usr/bin/env", "-i", f"PATH={_PATH}"]
        if uid is None:
            # Inside the new user namespace, where Linux 5.14+ counts its processes alone.
            return [*clean, *bwrap, *prlimit, *python]
        setpriv = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
        return [*clean, *prlimit, *setpriv, "--no-new-privs", "--", *bwrap, *python]


class _Inmate:
    """The sandboxed process as bubblewrap's status lines tell of it."""

    def __init__(self, process: subprocess.Popen[bytes], status: BinaryIO) -> None:
        self._process = process
        self._status = status
        self._text = b""

    @property
    def pid(self) -> int | None:
        """Its id on the host; None until bubblewrap has made it."""
        self._read(wait_s=0)
        found = re.search(rb'"child-pid": (\d+)\D', self._text)
        return int(found[1]) if found else None

    def kill(self) -> None:
        """End its whole process namespace; bubblewrap itself then reaps it and ends."""
        waited_until = time.monotonic() + _PID_WAIT_S
        while (pid := self.pid) is None and time.monotonic() < waited_until:
            if self._process.poll() is not None or self._read(wait_s=0.05) == b"":
                break
        if self._process.poll() is not None:
            return
        if pid is None:
            self._process.kill()
            return
        # A descriptor cannot be reused as a number can: verify, then signal.
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                if _parent(pid) == self._process.pid:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
            finally:
                os.close(fd)

    def exit_code(self) -> int | None:
        """What bubblewrap reported once all was over; None if the program never ran."""
        while self._read(wait_s=0):
            pass
        for line in self._text.decode().splitlines():
            record = json.loads(line)
            if "exit-code" in record:
                return int(record["exit-code"])
        return None

    def _read(self, *, wait_s: float) -> bytes | None:
        """Take status text that is there or comes within `wait_s`; empty at its end."""
        if not select.select([self._status], [], [], wait_s)[0]:
            return None
        data = os.read(self._status.fileno(), 4096)
        self._text += data
        return data


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[BinaryIO, BinaryIO]]:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as r, os.fdopen(writer, "wb", buffering=0) as w:
        yield r, w


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _system_mounts() -> list[str]:
    """/usr read-only, and the top-level names that lead into it."""
    mounts = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/lib", "/lib64"):
        if os.path.islink(name):
            mounts += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            mounts += ["--ro-bind", name, name]
    return mounts
