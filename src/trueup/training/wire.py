"""Calls between the processes of a run, over Unix sockets in a private directory.

A service exposes the methods it names in `exposed`; a call is one frame (length, msgpack), answered
by one frame, in any order. Whoever can open the socket may call: the directory that holds it is
readable by its owner alone. A typed error crosses as data and is raised at the caller; a peer that
is gone fails every call that waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from trueup.errors import DataError, Fault, TrueupError, from_dict
from trueup.training.codec import pack, unpack

_LENGTH = struct.Struct("<I")
_CALL, _RESULT, _ERROR = 0, 1, 2
_ENDING_S = 1.0
"""Longest wait for the exit status of a peer that hung up."""
_HANG_UP = (asyncio.IncompleteReadError, ConnectionError, DataError)
"""How a connection ends: closed, broken, or by bytes that nobody can read."""


class Service(Protocol):
    """An object whose coroutine methods others may call."""

    @property
    def exposed(self) -> tuple[str, ...]:
        """Names of the methods that may be called."""
        ...


async def serve(path: Path, service: Service) -> asyncio.Server:
    """Answer calls on a Unix socket until the server is closed."""
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(*_HANG_UP):
            while True:
                call, _, method, arguments = unpack(await _read(reader))
                task = asyncio.create_task(_answer(service, writer, call, method, arguments))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    return await asyncio.start_unix_server(connected, path=str(path))


async def _answer(
    service: Service, writer: asyncio.StreamWriter, call: int, method: str, arguments: Any
) -> None:
    try:
        if method not in service.exposed:
            raise Fault(field="method", rule=f"one of {service.exposed}", value=method)
        frame = _frame((call, _RESULT, await getattr(service, method)(*arguments), None))
    except TrueupError as error:
        frame = _frame((call, _ERROR, error.as_dict(), None))
    except Exception:  # the process boundary: whatever went wrong must reach the caller
        fault = Fault(traceback.format_exc(), field=method)
        frame = _frame((call, _ERROR, fault.as_dict(), None))
    with contextlib.suppress(ConnectionError):
        writer.write(frame)
        await writer.drain()


class Client:
    """Calls a service in another process.

    Args:
        name: What the peer is called in errors.
        why_ended: Waits up to so many seconds for the peer to end and says why, or "" if it lives.
        fault: What calls raise when it is gone.
        on_gone: Told once when it hangs up before `close`.
    """

    def __init__(
        self,
        name: str,
        *,
        why_ended: Callable[[float], str] = lambda wait_s: "",
        fault: type[Fault] = Fault,
        on_gone: Callable[[Fault], None] = lambda fault: None,
    ) -> None:
        """Not connected yet."""
        self.name = name
        self._why_ended = why_ended
        self._fault = fault
        self._on_gone = on_gone
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count()
        self._gone = ""
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    def wait_for(self, path: Path, timeout_s: float) -> None:
        """Block until the peer listens.

        Raises:
            Fault: It died or did not listen in time.
        """
        deadline = time.monotonic() + timeout_s
        while not _listens(path):
            if why := self._why_ended(0):
                raise Fault(f"{self.name} ended before it was ready: {why}", field=self.name)
            if time.monotonic() > deadline:
                raise Fault(field=self.name, rule=f"ready within {timeout_s:g} s", value="silence")
            time.sleep(0.02)

    async def connect(self, path: Path) -> None:
        """Connect to a peer that listens."""
        reader, self._writer = await asyncio.open_unix_connection(str(path))
        self._reading = asyncio.create_task(self._read_answers(reader))

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the peer and wait for its answer.

        Raises:
            TrueupError: What the method raised, or a Fault when the peer is gone.
        """
        if self._gone or self._writer is None:
            raise self._gone_fault()
        call = next(self._ids)
        frame = _frame((call, _CALL, method, arguments))
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        self._writer.write(frame)
        return await future

    async def close(self) -> None:
        """Hang up."""
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    async def _read_answers(self, reader: asyncio.StreamReader) -> None:
        try:
            with contextlib.suppress(*_HANG_UP):
                while True:
                    self._answer(*unpack(await _read(reader)))
            # A process's sockets close a moment before its exit status is known.
            self._gone = self._why_ended(_ENDING_S) or "it hung up"
        except asyncio.CancelledError:
            self._gone = "closed"
            raise
        finally:
            # Also when cancelled: what this process still asks while it ends must not wait.
            self._fail_calls()
        self._on_gone(self._gone_fault())

    def _answer(self, call: int, kind: int, value: Any, _: None) -> None:
        future = self._calls.pop(call)
        if future.done():
            return
        if kind == _RESULT:
            future.set_result(value)
        else:
            future.set_exception(from_dict(value))

    def _fail_calls(self) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self._gone_fault())
        self._calls.clear()

    def _gone_fault(self) -> Fault:
        return self._fault(f"{self.name} is gone: {self._gone or 'closed'}", field=self.name)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True


def _frame(message: Any) -> bytes:
    body = pack(message)
    return _LENGTH.pack(len(body)) + body


async def _read(reader: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)
