"""Run vLLM's API server so that it cannot outlive whoever started it.

Started with vLLM's interpreter, in a process group of its own, as
`python -m trueup.engines.vllm.launch [arguments of the API server]`. It lives as long as the other
end of its stdin; then the whole group goes, vLLM's engine process and workers included, whatever
state they are in. A server that is to be started by hand takes the same arguments from
`python -m vllm.entrypoints.openai.api_server`.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading

SERVER = "vllm.entrypoints.openai.api_server"


def die_with_parent() -> None:
    """Kill this process group when stdin ends."""
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Watch stdin in a thread and serve in this one."""
    threading.Thread(target=die_with_parent, daemon=True).start()
    sys.argv[0] = SERVER
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
