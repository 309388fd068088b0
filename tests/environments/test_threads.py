"""Threads for blocking calls: reused, given up when hung, and never in the way of an exit."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from trueup.environments.threads import DaemonThreads


def test_one_call_after_the_other_shares_a_thread() -> None:
    async def main() -> set[int]:
        threads = DaemonThreads()
        return {await threads.run(threading.get_ident) for _ in range(20)}

    assert len(asyncio.run(main())) == 1


def test_calls_at_once_have_threads_of_their_own() -> None:
    barrier = threading.Barrier(3, timeout=10)

    async def main() -> list[int]:
        threads = DaemonThreads()
        return await asyncio.gather(*(threads.run(barrier.wait) for _ in range(3)))

    assert sorted(asyncio.run(main())) == [0, 1, 2]


def test_what_a_call_raises_reaches_the_one_who_waits_and_the_thread_serves_on() -> None:
    async def main() -> int:
        threads = DaemonThreads()
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 // 0)
        return await threads.run(lambda: 7)

    assert asyncio.run(main()) == 7


def test_a_call_that_never_returns_blocks_neither_the_next_one_nor_the_exit() -> None:
    program = """
import asyncio, threading
from trueup.environments.threads import DaemonThreads

async def main():
    threads = DaemonThreads()
    hung = asyncio.create_task(threads.run(threading.Event().wait))
    await asyncio.sleep(0.05)
    print(await threads.run(lambda: "served"))
    hung.cancel()

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "served\n"
