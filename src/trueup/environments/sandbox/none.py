"""No isolation: the program runs as the user, on the user's files and network.

For machines without a sandbox, by a person who wrote `sandbox.kind = "none"` down. It keeps the
deadline and the bound on output; it does not keep the program from anything.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trueup.environments.sandbox.base import ExecResult, Limits
from trueup.environments.sandbox.process import sealed, supervise
from trueup.errors import EnvironmentFault


class NoSandbox:
    """Runs programs in a session of their own with an empty environment, and nothing more.

    Args:
        limits: Only `memory_bytes` and `output_bytes` are kept.
    """

    kind = "none"
    description = "NO isolation: programs can do whatever the user can"

    def __init__(self, *, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._closed = False

    def exec(self, program: str, stdin: str, *, deadline_s: float) -> ExecResult:
        """Run a Python program; see `Sandbox.exec`."""
        if self._closed:
            raise EnvironmentFault(field="closed", rule="an open sandbox", value=self.kind)
        with tempfile.TemporaryDirectory(prefix="trueup-") as box, sealed(stdin.encode()) as given:
            main = Path(box, "main.py")
            main.write_text(program, encoding="utf-8")
            started = time.monotonic()
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-B", str(main)],
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={},
                    cwd=box,
                    start_new_session=True,
                )
            except OSError as error:
                raise EnvironmentFault(str(error), field="start", value=error.errno) from error

            def kill() -> None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

            outcome = supervise(
                process,
                started=started,
                deadline_s=deadline_s,
                output_bytes=self._limits.output_bytes,
                memory_bytes=self._limits.memory_bytes,
                kill=kill,
                root=lambda: process.pid,
            )
        code = process.returncode
        return ExecResult(
            stdout=outcome.stdout.decode(errors="replace"),
            stderr=outcome.stderr.decode(errors="replace"),
            exit_code=code if code >= 0 else 128 - code,
            timed_out=outcome.timed_out,
            truncated=outcome.truncated,
            seconds=outcome.seconds,
        )

    def close(self) -> None:
        """Refuse further programs."""
        self._closed = True
