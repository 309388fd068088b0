"""Threads for blocking calls, reused, that do not keep a process from ending.

An executor's threads are joined when the interpreter ends, so that one hung call would hold the
process for ever. These are daemons: a call that never returns costs its thread and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

_Job = Callable[[], None]


class DaemonThreads:
    """As many threads as calls run at once; idle ones take the next call."""

    def __init__(self) -> None:
        """No thread is running."""
        self._idle: list[SimpleQueue[_Job]] = []

    async def run(self, call: Callable[[], T]) -> T:
        """Await a blocking call on a thread of its own."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        jobs = self._idle.pop() if self._idle else self._start()

        def deliver(settle: Callable[[Any], None], value: Any) -> None:
            if not future.done():
                settle(value)

        def job() -> None:
            outcome: tuple[Callable[[Any], None], Any]
            try:
                outcome = future.set_result, call()
            except BaseException as error:  # whatever it is belongs to the one who waits
                outcome = future.set_exception, error
            self._idle.append(jobs)
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(deliver, *outcome)

        jobs.put(job)
        return await future

    @staticmethod
    def _start() -> SimpleQueue[_Job]:
        jobs: SimpleQueue[_Job] = SimpleQueue()
        threading.Thread(target=_serve, args=(jobs,), name="trueup-env", daemon=True).start()
        return jobs


def _serve(jobs: SimpleQueue[_Job]) -> None:
    while True:
        jobs.get()()
