"""Time as the controller sees it: the machine's, or a logical one that makes a run repeatable.

Everything asynchronous in a run takes its time from the event loop (`asyncio.sleep`, `loop.time`).
`LogicalEventLoop` is an event loop whose time stands still while anything can still happen and then
jumps to the next timer. Work of other processes and threads enters it only through
`Clock.take(work, duration_s)`: the result is delivered when exactly that much logical time has
passed and nothing else is left to do, in the order in which the work was handed over, however long
it really took. So two runs see the same order of events.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Awaitable, Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

DECODE_STEP_S = 0.001
"""Logical seconds of one decode step."""
TRAIN_STEP_S = 0.1
"""Logical seconds of one training step."""
SYNC_S = 0.005
"""Logical seconds of one weight sync."""


class Clock(Protocol):
    """How long a piece of outside work takes, as the controller sees it."""

    logical: bool

    async def take(self, work: Awaitable[T], duration_s: float) -> T:
        """Wait for work of another process or thread."""
        ...


class RealClock:
    """Work takes as long as it takes."""

    logical = False

    async def take(self, work: Awaitable[T], duration_s: float) -> T:
        """Wait for the work."""
        return await work


class LogicalClock:
    """Work takes the logical time it is said to take; needs a running `LogicalEventLoop`."""

    logical = True

    async def take(self, work: Awaitable[T], duration_s: float) -> T:
        """Start the work now and deliver its result `duration_s` of logical time later."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, LogicalEventLoop), "a logical clock needs a LogicalEventLoop"
        outside = asyncio.ensure_future(work)
        await asyncio.sleep(duration_s)
        return await loop.deliver(outside)


class LogicalEventLoop(asyncio.SelectorEventLoop):
    """An event loop on logical time; see the module's docstring."""

    def __init__(self) -> None:
        """Time starts at 0."""
        self._selector_hook = _LogicalSelector(selectors.DefaultSelector())
        super().__init__(self._selector_hook)  # type: ignore[arg-type]

    def time(self) -> float:
        """Logical seconds since the loop was made."""
        return self._selector_hook.now

    def deliver(self, outside: asyncio.Future[T]) -> asyncio.Future[T]:
        """The result of outside work, once it is there and nothing else can happen before."""
        delivered: asyncio.Future[T] = self.create_future()
        self._selector_hook.due.append((outside, delivered))
        return delivered

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Wait for the executor's threads; a time-out in logical seconds would pass at once."""
        await super().shutdown_default_executor()


class _LogicalSelector:
    """A selector that knows when the loop has nothing left to do.

    asyncio selects with timeout 0 while callbacks are ready, else with the time to the next timer
    or None. Only in the second case is a due result delivered, or time moved.
    """

    def __init__(self, inner: selectors.BaseSelector) -> None:
        self._inner = inner
        self.now = 0.0
        self.due: deque[tuple[asyncio.Future[Any], asyncio.Future[Any]]] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is not None and timeout <= 0:
            return self._inner.select(0)
        if self.due:
            outside, delivered = self.due[0]
            if not outside.done():
                return self._inner.select(None)
            self.due.popleft()
            _copy_result(outside, delivered)
            return []
        if timeout is None:
            return self._inner.select(None)
        self.now += timeout
        return []


def _copy_result(outside: asyncio.Future[Any], delivered: asyncio.Future[Any]) -> None:
    if delivered.done():
        return
    if outside.cancelled():
        delivered.cancel()
    elif error := outside.exception():
        delivered.set_exception(error)
    else:
        delivered.set_result(outside.result())


def run(main: Coroutine[Any, Any, T], *, logical: bool) -> T:
    """Run a coroutine to its end on real or logical time."""
    factory = LogicalEventLoop if logical else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)
