"""The port behind which model-written code runs, and what one execution may use.

One call, one fresh world: nothing of an execution survives it. The program's own doing (exception,
exit code, deadline, flood of output) is a result; a sandbox that could not be started is an
`EnvironmentFault`, so that infrastructure is never mistaken for a wrong answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one execution may use."""

    processes: int = 64
    """Processes and threads at once."""
    process_bytes: int = 512 << 20
    """Address space of one process."""
    memory_bytes: int = 1 << 30
    """Resident memory of all its processes together, sampled by the host."""
    disk_bytes: int = 32 << 20
    """Each of its writable directories, and its largest file."""
    open_files: int = 128
    output_bytes: int = 1 << 20
    """stdout and stderr together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What a program did."""

    stdout: str
    stderr: str
    exit_code: int
    """128 + the signal's number if a signal ended it."""
    timed_out: bool
    """It was killed at its deadline."""
    truncated: bool
    """It wrote more than `Limits.output_bytes`: it was killed and the rest is lost."""
    seconds: float
    """Host's monotonic time from launch to the death of its last process."""


class Sandbox(Protocol):
    """Runs Python programs, each in a world of its own; may be called from many threads."""

    kind: str
    """What the episode records: `bwrap`, `bwrap-user`, `none`."""
    description: str
    """One line for people: what isolates, and what does not."""

    def exec(self, program: str, stdin: str, *, deadline_s: float) -> ExecResult:
        """Run a Python program to its end, its deadline or a limit.

        Args:
            program: Source text of the main module.
            stdin: What it can read from standard input.
            deadline_s: Wall time in seconds from launch, after which all its processes are killed.

        Raises:
            EnvironmentFault: The sandbox could not be started (`field` is `start`) or is closed.
        """
        ...

    def close(self) -> None:
        """Refuse further programs; those running end by their deadline. May be called twice."""
        ...
