"""JSON over HTTP to an inference server, with deadlines that hold.

Nothing that was sent is ever sent again: a retried request is another sample. Only a connection
that was refused is tried again, for a while, because a server may still be starting. Redirects and
proxies are not followed, and a call that is abandoned closes its socket, which servers take as the
end of the request.
"""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
import json
import socket
import ssl
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from trueup.errors import ConfigError, EngineFault

_REPLY_BYTES = 256 << 20
"""Longest reply that is read."""
_CONNECT_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server listens."""

    host: str
    port: int
    tls: bool
    prefix: str
    """Path that comes before every other, without a slash at its end."""
    label: str
    """What follows `#`: a name that is not sent."""

    @classmethod
    def parse(cls, url: str, *, plain_http: Collection[str] = ()) -> Address:
        """Read `http(s)://host[:port][/prefix][#label]`.

        Args:
            url: Without user, password or query.
            plain_http: Hosts beside the loopback that may be spoken to without encryption.

        Raises:
            ConfigError: Another form, or unencrypted to another machine.
        """
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.scheme not in ("http", "https") or not host or parts.username or parts.query:
            rule = "http(s)://host[:port][/path][#name] without user or query"
            raise ConfigError(field="engine.url", rule=rule, value=_shown(url))
        if parts.scheme == "http" and not _loopback(host) and host not in plain_http:
            raise ConfigError(
                field="engine.url",
                rule="https, http on the loopback, or http to a host allowed by its name "
                "(TRUEUP_ENGINE_PLAIN_HTTP)",
                value=_shown(url),
            )
        tls = parts.scheme == "https"
        return cls(
            host=host,
            port=parts.port or (443 if tls else 80),
            tls=tls,
            prefix=parts.path.rstrip("/"),
            label=parts.fragment,
        )

    def __str__(self) -> str:
        """The address as a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"


class JsonClient:
    """Calls a server, each call on a connection and a thread of its own.

    Args:
        address: Where it listens.
        token: Sent as bearer token; never in an error.
        timeout_s: For the answer, once there is a connection.
        connect_s: For the connection; a refused one is tried again.
        connections: Calls at once; further ones wait, which their deadline does not count.
    """

    def __init__(
        self,
        address: Address,
        *,
        token: str = "",
        timeout_s: float = 600.0,
        connect_s: float = 5.0,
        connections: int = 16,
    ) -> None:
        """Connect to nothing yet."""
        self.address = address
        self._headers = {"Accept": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout_s = timeout_s
        self._connect_s = connect_s
        self._threads = ThreadPoolExecutor(connections, thread_name_prefix="trueup-http")
        self._free = asyncio.Semaphore(connections)
        self._open: set[_Call] = set()

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """What `GET path` answers. Errors as `post`."""
        return await self._call("GET", path, b"", timeout_s)

    async def post(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> Any:
        """What `POST path` answers to a JSON object.

        Args:
            path: Behind the address's prefix.
            body: Sent once.
            timeout_s: Another deadline than the client's.

        Raises:
            EngineFault: No server, no answer in time, the connection broke, a status other than
                200, or a reply that is not JSON.
        """
        return await self._call("POST", path, json.dumps(body).encode(), timeout_s)

    def close(self) -> None:
        """Abandon every call; those that wait for it get an EngineFault."""
        for call in tuple(self._open):
            call.abandon()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _call(self, method: str, path: str, body: bytes, timeout_s: float | None) -> Any:
        allowed_s = self._timeout_s if timeout_s is None else timeout_s
        async with self._free:
            call = _Call(self.address, self._connect_s, allowed_s)
            self._open.add(call)
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(self._connect_s + allowed_s):
                    return await loop.run_in_executor(
                        self._threads, call.run, method, path, body, self._headers
                    )
            except TimeoutError:  # byte by byte, each in time
                raise _late(f"{method} {self.address}{path}", allowed_s) from None
            finally:
                call.abandon()
                self._open.discard(call)


class _Call:
    """One request and its reply, in a thread; another thread may abandon it."""

    def __init__(self, address: Address, connect_s: float, timeout_s: float) -> None:
        self._address = address
        self._connect_s = connect_s
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._abandoned = False

    def run(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Any:
        target = f"{method} {self._address}{path}"
        typed = {**headers, "Content-Type": "application/json"} if body else dict(headers)
        connection = self._connected(target)
        try:
            connection.request(method, self._address.prefix + path, body or None, typed)
            response = connection.getresponse()
            raw = response.read(_REPLY_BYTES + 1)
        except TimeoutError:
            raise _late(target, self._timeout_s) from None
        except (OSError, http.client.HTTPException) as error:
            raise EngineFault(field=target, rule="answered", value=repr(error)) from error
        finally:
            with self._lock:
                self._socket = None
            connection.close()
        if response.status != 200:
            shown = raw[:300].decode(errors="replace")
            raise EngineFault(field=target, rule="status 200", value=f"{response.status} {shown}")
        if len(raw) > _REPLY_BYTES:
            raise EngineFault(field=target, rule=f"at most {_REPLY_BYTES} bytes", value="more")
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            shown = raw[:80].decode(errors="replace")
            raise EngineFault(field=target, rule="JSON", value=shown) from error

    def abandon(self) -> None:
        """End the call as soon as it touches its socket; nothing if it is over."""
        with self._lock:
            self._abandoned = True
            if self._socket is not None:
                try:
                    self._socket.shutdown(socket.SHUT_RDWR)
                except OSError:  # the other end was first
                    return

    def _connected(self, target: str) -> http.client.HTTPConnection:
        until = time.monotonic() + self._connect_s
        while True:
            connection = self._connection()
            try:
                connection.connect()
            except ConnectionRefusedError as error:
                connection.close()
                if self._abandoned or time.monotonic() >= until:
                    raise EngineFault(
                        field=target, rule="a server that listens", value=repr(error)
                    ) from error
                time.sleep(_CONNECT_PAUSE_S)
                continue
            except OSError as error:
                connection.close()
                raise EngineFault(field=target, rule="reachable", value=repr(error)) from error
            with self._lock:
                if self._abandoned:
                    connection.close()
                    raise EngineFault(field=target, rule="waited for", value="abandoned")
                connection.sock.settimeout(self._timeout_s)
                self._socket = connection.sock
            return connection

    def _connection(self) -> http.client.HTTPConnection:
        host, port, wait_s = self._address.host, self._address.port, max(self._connect_s, 0.1)
        if not self._address.tls:
            return http.client.HTTPConnection(host, port, timeout=wait_s)
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(host, port, timeout=wait_s, context=context)


def _late(target: str, allowed_s: float) -> EngineFault:
    return EngineFault(field=target, rule=f"answered within {allowed_s:g} s", value="no answer")


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _shown(url: str) -> str:
    """A URL without what may be secret."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
