"""A vLLM server of our own: started, waited for, and killed with everything it started.

It runs with the interpreter of vLLM's own environment, listens on a Unix socket in a private
directory (its control calls can change weights and know no password), and dies with this process,
however that ends (`launch`). Nothing but trueup itself is added to what it can import.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import trueup
from trueup.errors import ConfigError, EngineFault

PYTHON_VARIABLE = "TRUEUP_VLLM_PYTHON"
START_S = 280.0
"""Longest start: about 25 s on two idle cores."""
_PACKAGE = Path(trueup.__file__).parent
_LAST_WORDS = 2000
"""Characters of the log that an error carries."""
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    # Eager mode still compiles one helper of the sampler, for half a minute at the first request.
    "TORCH_COMPILE_DISABLE": "1",
    # Opens the calls that pause and update.
    "VLLM_SERVER_DEV_MODE": "1",
    # The default keeps one of the cores free; which ones to use is left to the scheduler, since
    # engines, trainer and sandboxes share them.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # For the same reason its threads sleep while they wait.
    "OMP_WAIT_POLICY": "PASSIVE",
}
_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1"}
"""What the user's environment may set otherwise; GiB."""


def interpreter() -> Path:
    """Python of the environment that holds vLLM.

    Raises:
        ConfigError: There is none.
    """
    named = os.environ.get(PYTHON_VARIABLE)
    path = Path(named) if named else _PACKAGE.parents[1] / ".vllm-env" / "bin" / "python"
    if not os.access(path, os.X_OK):
        raise ConfigError(
            field="engine.kind",
            rule=f"vllm after `make vllm`, or with {PYTHON_VARIABLE} naming a Python that has it",
            value=str(path),
        )
    return path


class Server:
    """A running server; `directory` is its own and goes with it.

    Args:
        arguments: Of vLLM's API server, without where to listen.
        threads: Torch threads of its worker.
        directory: Private directory for its socket and log; made if not given.
    """

    def __init__(
        self, arguments: Sequence[str], *, threads: int, directory: Path | None = None
    ) -> None:
        """Start it; `wait` until it listens."""
        self.directory = directory or private_directory()
        self.socket = self.directory / "vllm.sock"
        self.log = self.directory / "vllm.log"
        importable = self.directory / "importable"
        importable.mkdir()
        (importable / "trueup").symlink_to(_PACKAGE)
        command = [str(interpreter()), "-m", "trueup.engines.vllm.launch"]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, str(self.directory), "--uds", str(self.socket), *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={
                    **_DEFAULTS,
                    **os.environ,
                    **_ENVIRONMENT,
                    "PYTHONPATH": str(importable),
                    "OMP_NUM_THREADS": str(threads),
                },
            )

    @property
    def pid(self) -> int:
        """Of the API server, which leads the process group."""
        return self._process.pid

    def wait(self, timeout_s: float = START_S) -> None:
        """Block until it listens, which it does once its engine is up.

        Raises:
            EngineFault: It ended, or did not answer in time; it is killed.
        """
        deadline = time.monotonic() + timeout_s
        while not self._listens():
            if why := self.why_ended():
                self.kill()
                raise EngineFault(f"vLLM ended before it was ready: {why}", field="vLLM")
            if time.monotonic() > deadline:
                said = self._last_words()
                self.kill()
                raise EngineFault(f"vLLM was not ready within {timeout_s:g} s: {said}")
            time.sleep(0.1)

    def why_ended(self) -> str:
        """Exit status and last words, or "" while it lives."""
        status = self._process.poll()
        return "" if status is None else f"exit status {status}: {self._last_words()}"

    def kill(self) -> None:
        """End it and everything it started, whatever state that is in; may be called twice."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
        return True

    def _last_words(self) -> str:
        try:
            return self.log.read_text(errors="replace")[-_LAST_WORDS:]
        except OSError:
            return "its log is gone"


def private_directory() -> Path:
    """A directory that this user alone can enter."""
    return Path(tempfile.mkdtemp(prefix="trueup-vllm-"))
