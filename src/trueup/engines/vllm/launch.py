"""Run vLLM's API server so that it cannot outlive whoever started it.

Started with vLLM's interpreter, in a process group of its own, as
`python -m trueup.engines.vllm.launch DIRECTORY [arguments of the API server]`. It lives as long as
the other end of its stdin; then its directory goes, and the whole group, vLLM's engine process and
workers included, whatever state they are in. A server that is to be started by hand takes the same
arguments from `python -m vllm.entrypoints.openai.api_server`.
"""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import sys
import threading

SERVER = "vllm.entrypoints.openai.api_server"


def die_with_parent(directory: str) -> None:
    """When stdin ends, remove the server's directory and kill this process group."""
    sys.stdin.buffer.read()
    shutil.rmtree(directory, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Watch stdin in a thread and serve in this one."""
    directory = sys.argv.pop(1)
    threading.Thread(target=die_with_parent, args=(directory,), daemon=True).start()
    sys.argv[0] = SERVER
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
