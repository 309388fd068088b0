"""vLLM's CPU build as a side: in a process of its own environment, driven by lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from rollout_sides.traffic import Outcome, Traffic

_CHILD = Path(__file__).with_name("vllm_child.py")


class Vllm:
    """An engine that keeps running between runs, idle.

    Args:
        python: Interpreter of an environment that has vLLM.
        directory: The model.
        log: Where its messages go.

    Raises:
        RuntimeError: It ended before it was ready.
    """

    def __init__(self, python: Path, directory: Path, log: Path) -> None:
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0-1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with log.open("wb") as messages:
            self._process = subprocess.Popen(
                [str(python), str(_CHILD), str(directory)],
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                text=True,
            )
        self._log = log
        self._answer()

    def run(self, traffic: Traffic) -> Outcome:
        """See `Side.run`."""
        assert self._process.stdin is not None
        request = {
            "prompts": list(traffic.requests()),
            "max_tokens": traffic.max_tokens,
            "stop_ids": list(traffic.stop_ids),
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Outcome(**self._answer())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = self._log.read_text(errors="replace").strip().splitlines()[-5:]
            raise RuntimeError("vLLM ended: " + " | ".join(said))
        answer: dict[str, Any] = json.loads(line)
        return answer
