import asyncio
import contextlib
import struct
import tempfile
import threading
import time
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from trueup import config
from trueup.errors import (
    ConfigError,
    DataError,
    EngineFault,
    Fault,
    GraderFault,
    SandboxUnavailable,
    TransportFault,
    TrueupError,
)
from trueup.records.directory import RunDirectory
from trueup.training.clock import RealClock
from trueup.training.codec import pack
from trueup.training.runtime_local import LocalRuntime
from trueup.training.wire import Client, serve
from trueup.types import Task


class Peer:
    """A service whose `wait` returns when it is told to."""

    exposed = ("echo", "wait", "let_go", "refuse", "crash", "answer_nonsense")

    def __init__(self) -> None:
        self.error: TrueupError = Fault("none")
        self._gates: dict[str, asyncio.Event] = {}

    async def echo(self, *values: object) -> object:
        return values

    async def wait(self, name: str) -> str:
        await self._gates.setdefault(name, asyncio.Event()).wait()
        return name

    async def let_go(self, name: str) -> None:
        self._gates.setdefault(name, asyncio.Event()).set()

    async def refuse(self) -> None:
        raise self.error

    async def crash(self) -> None:
        raise ZeroDivisionError("by accident")

    async def answer_nonsense(self) -> object:
        return object()

    async def secret(self) -> str:
        return "not to be had"


@pytest.fixture
def socket() -> Iterator[Path]:
    # the path of a socket is short, pytest's directories need not be
    with tempfile.TemporaryDirectory(prefix="trueup-test-") as directory:
        yield Path(directory) / "peer.sock"


@asynccontextmanager
async def connected(path: Path, peer: Peer, **options: object) -> AsyncIterator[Client]:
    server = await serve(path, peer)
    client = Client("peer", **options)
    await client.connect(path)
    try:
        yield client
    finally:
        await client.close()
        await closed(server)


async def closed(server: asyncio.Server) -> None:
    """Close a server whose clients have hung up, and wait until it has noticed."""
    server.close()
    while len(asyncio.all_tasks()) > 1:
        await asyncio.sleep(0.001)


def test_arguments_and_results_cross_with_their_types(socket: Path):
    sent = (1, "a", None, array("f", [0.5]), Task(id="t", split="train"), {"k": (1, 2)})

    async def main() -> object:
        async with connected(socket, Peer()) as client:
            return await client.call("echo", *sent)

    assert asyncio.run(main()) == sent


def test_calls_run_side_by_side_and_each_gets_its_own_answer_in_any_order(socket: Path):
    async def main() -> list[str]:
        order = []
        async with connected(socket, Peer()) as client:

            async def call(name: str) -> None:
                answer = await client.call("wait", name)
                assert answer == name
                order.append(name)

            calls = [asyncio.create_task(call(name)) for name in "abc"]
            for name in "cab":
                await client.call("let_go", name)
                while name not in order:
                    await asyncio.sleep(0)
            await asyncio.gather(*calls)
        return order

    assert asyncio.run(main()) == ["c", "a", "b"]


def test_two_clients_do_not_get_each_others_answers(socket: Path):
    async def main() -> list[object]:
        peer = Peer()
        async with connected(socket, peer) as one:
            two = Client("two")
            await two.connect(socket)
            answers = await asyncio.gather(
                *(client.call("echo", i) for i in range(20) for client in (one, two))
            )
            await two.close()
            return answers

    assert asyncio.run(main()) == [(i,) for i in range(20) for _ in range(2)]


@pytest.mark.parametrize(
    "error",
    [
        EngineFault("lost its weights", field="engine-0", rule="serving", value=7),
        GraderFault(field="reward", rule="finite", value=1.5),
        TransportFault(field="tensor w", rule="of digest ab", value="cd"),
        DataError(field="record", rule="whole", value=None),
        SandboxUnavailable("nothing isolates", field="sandbox"),
        ConfigError(field="a.b", rule="known", value=True),
    ],
    ids=lambda error: error.kind,
)
def test_typed_errors_cross_with_every_field(error: TrueupError, socket: Path):
    peer = Peer()
    peer.error = error

    async def main() -> TrueupError:
        async with connected(socket, peer) as client:
            with pytest.raises(TrueupError) as caught:
                await client.call("refuse")
            assert await client.call("echo", 1) == (1,), "the connection survives"
            return caught.value

    found = asyncio.run(main())
    assert type(found) is type(error)
    assert found.as_dict() == error.as_dict()
    assert found.exit_code == error.exit_code


def test_any_other_exception_is_a_fault_that_tells_where_it_was(socket: Path):
    async def main() -> None:
        async with connected(socket, Peer()) as client:
            with pytest.raises(Fault, match="by accident") as caught:
                await client.call("crash")
            assert caught.value.field == "crash"
            assert "test_wire.py" in caught.value.message
            with pytest.raises(Fault, match="takes 1 positional argument"):
                await client.call("refuse", "too", "many")
            assert await client.call("echo") == ()

    asyncio.run(main())


@pytest.mark.parametrize("method", ["secret", "__init__", "exposed", "error", "nowhere"])
def test_a_method_that_is_not_exposed_is_refused(method: str, socket: Path):
    async def main() -> None:
        async with connected(socket, Peer()) as client:
            with pytest.raises(Fault, match="method must be one of") as caught:
                await client.call(method)
            assert caught.value.value == method

    asyncio.run(main())


def test_what_cannot_travel_is_refused_on_either_side_and_nobody_hangs(socket: Path):
    async def main() -> None:
        async with connected(socket, Peer()) as client:
            with pytest.raises(DataError, match="cannot encode"):
                await client.call("echo", object())
            with pytest.raises(DataError, match="cannot encode"):
                await asyncio.wait_for(client.call("answer_nonsense"), 5)
            assert await client.call("echo", 1) == (1,)

    asyncio.run(main())


async def mute_server(path: Path, last_words: bytes) -> asyncio.Server:
    """A peer that reads three calls, says its last words and dies."""

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(3):
            (length,) = struct.unpack("<I", await reader.readexactly(4))
            await reader.readexactly(length)
        writer.write(last_words)
        writer.close()

    return await asyncio.start_unix_server(die, path=str(path))


def framed(value: object) -> bytes:
    body = pack(value)
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    "last_words",
    [b"", b"\x08\0\0\0half", struct.pack("<I", 3) + b"\xc1\xc1\xc1"],
    ids=["silence", "half an answer", "garbage"],
)
@pytest.mark.parametrize("alive", ["", "exit status -9"], ids=["alive", "dead"])
def test_a_peer_that_is_gone_fails_every_call_that_waits_and_tells_once(
    alive: str, last_words: bytes, socket: Path
):
    told: list[Fault] = []

    async def main() -> None:
        server = await mute_server(socket, last_words)
        client = Client(
            "peer", why_ended=lambda wait_s: alive, fault=EngineFault, on_gone=told.append
        )
        await client.connect(socket)
        calls = [client.call("echo", i) for i in range(3)]
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
        for result in results:
            assert type(result) is EngineFault
            assert result.message == f"peer is gone: {alive or 'it hung up'}"
            assert result.field == "peer"
        with pytest.raises(EngineFault, match="peer is gone"):
            await client.call("echo")
        await client.close()
        await closed(server)

    asyncio.run(main())
    assert [type(fault) for fault in told] == [EngineFault]


def test_a_call_made_while_its_process_ends_fails_instead_of_waiting(socket: Path):
    refused: list[Fault] = []

    async def ask_and_ask_again(client: Client) -> None:
        try:
            await client.call("wait", "for ever")
        finally:
            try:
                await client.call("let_go", "for ever")
            except Fault as fault:
                refused.append(fault)
            await client.close()

    async def a_process_that_ends() -> None:
        client = Client("peer")
        await client.connect(socket)
        task = asyncio.create_task(ask_and_ask_again(client))
        await asyncio.sleep(0.05)
        assert not task.done()
        # its loop now cancels everything, readers included

    async def main() -> None:
        peer = Peer()
        server = await serve(socket, peer)
        ending = threading.Thread(target=asyncio.run, args=(a_process_that_ends(),), daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, 10)
        assert not ending.is_alive()
        await peer.let_go("for ever")
        await closed(server)

    asyncio.run(main())
    assert [fault.message for fault in refused] == ["peer is gone: closed"]


def test_answers_that_came_before_the_end_still_count(socket: Path):
    async def main() -> list[object]:
        server = await mute_server(socket, framed((1, 1, "in time", None)))
        client = Client("peer")
        await client.connect(socket)
        calls = [client.call("echo", i) for i in range(3)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        await client.close()
        await closed(server)
        return results

    first, second, third = asyncio.run(main())
    assert second == "in time"
    assert type(first) is type(third) is Fault


def test_who_hangs_up_is_not_told_that_the_peer_is_gone(socket: Path):
    told: list[Fault] = []

    async def main() -> None:
        async with connected(socket, Peer(), on_gone=told.append) as client:
            assert await client.call("echo") == ()
        await asyncio.sleep(0.01)
        with pytest.raises(Fault, match="gone: closed"):
            await client.call("echo")

    asyncio.run(main())
    assert told == []


def test_a_call_that_nobody_awaits_any_more_does_not_disturb_the_others(socket: Path):
    async def main() -> object:
        async with connected(socket, Peer()) as client:
            waiting = asyncio.create_task(client.call("wait", "a"))
            await client.call("echo")
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
            await client.call("let_go", "a")
            return await client.call("echo", "still here")

    assert asyncio.run(main()) == ("still here",)


def test_bytes_that_nobody_can_read_end_the_connection_and_not_the_service(socket: Path):
    async def main() -> None:
        async with connected(socket, Peer()) as client:
            reader, writer = await asyncio.open_unix_connection(str(socket))
            writer.write(struct.pack("<I", 3) + b"\xc1\xc1\xc1")
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
            assert await client.call("echo", 1) == (1,)

    asyncio.run(main())


def test_waiting_for_a_peer_ends_when_it_listens(socket: Path):
    with socket.with_name("plain").open("wb"):
        pass
    client = Client("late")
    loop = asyncio.new_event_loop()

    async def start() -> asyncio.Server:
        await asyncio.sleep(0.1)
        return await serve(socket, Peer())

    thread = threading.Thread(target=lambda: servers.append(loop.run_until_complete(start())))
    servers: list[asyncio.Server] = []
    started = time.monotonic()
    thread.start()
    client.wait_for(socket, 30)
    assert 0.05 < time.monotonic() - started < 25
    thread.join()
    servers[0].close()
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def test_waiting_for_a_peer_that_died_says_why(socket: Path):
    client = Client("learner", why_ended=lambda wait_s: "exit status 1; ImportError")
    with pytest.raises(Fault, match="learner ended before it was ready: exit status 1; ImportE"):
        client.wait_for(socket, 30)


def test_waiting_for_a_peer_that_never_listens_ends(socket: Path):
    with pytest.raises(Fault, match=r"learner must be ready within 0\.05 s"):
        Client("learner").wait_for(socket, 0.05)


def test_the_sockets_of_a_run_are_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shared = tmp_path / "tmp"
    shared.mkdir(mode=0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    runtime = LocalRuntime(
        config.load(),
        RunDirectory.create(tmp_path, "run"),
        tmp_path,
        version=0,
        epoch=0,
        clock=RealClock(),
        on_gone=lambda fault: None,
    )
    (private,) = shared.iterdir()
    assert private.stat().st_mode & 0o777 == 0o700
    asyncio.run(runtime.close())
    assert list(shared.iterdir()) == []
