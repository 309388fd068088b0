import asyncio
import threading
import time

import pytest

from support.openai_server import Behaviour, serving
from trueup.engines.http import Address, JsonClient
from trueup.errors import ConfigError, EngineFault


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://localhost/v1/", "http://localhost:80/v1"),
        ("http://[::1]:8000#name", "http://[::1]:8000"),
        ("https://example.org/v1", "https://example.org:443/v1"),
        ("http://allowed:1", "http://allowed:1"),
    ],
)
def test_addresses_that_are_allowed(url: str, expected: str) -> None:
    assert str(Address.parse(url, plain_http=["allowed"])) == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "http://",
        "file:///etc/passwd",
        "http://example.org",
        "http://127.0.0.1.example.org",
        "http://10.0.0.1:8000",
        "http://user:word@127.0.0.1",
        "http://127.0.0.1/?key=word",
    ],
)
def test_addresses_that_are_refused_without_repeating_what_may_be_secret(url: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.url") as caught:
        Address.parse(url)
    assert "word" not in str(caught.value)


def test_waiting_for_a_free_connection_does_not_count_against_the_deadline() -> None:
    async def main(url: str) -> None:
        client = JsonClient(Address.parse(url), timeout_s=0.5, connections=1)
        body = {"max_tokens": 1, "prompt": [1], "seed": 0, "temperature": 1.0, "top_p": 1.0}
        body |= {"top_k": -1, "logprobs": 0, "stop_token_ids": []}
        begin = time.monotonic()
        await asyncio.gather(*(client.post("/v1/completions", body) for _ in range(4)))
        assert time.monotonic() - begin > 0.5
        client.close()

    with serving(Behaviour(token_s=0.2)) as url:
        asyncio.run(main(url))


def test_closing_ends_calls_that_wait() -> None:
    async def main(url: str) -> None:
        client = JsonClient(Address.parse(url), timeout_s=20)
        call = asyncio.create_task(client.post("/v1/completions", {"max_tokens": 2}))
        await asyncio.sleep(0.1)
        client.close()
        with pytest.raises(EngineFault):
            await asyncio.wait_for(call, 5)

    with serving(Behaviour(hang=threading.Event())) as url:
        asyncio.run(main(url))


def test_a_server_that_is_still_starting_is_waited_for() -> None:
    async def main(url: str) -> None:
        client = JsonClient(Address.parse(url), connect_s=10)
        call = asyncio.create_task(client.get("/v1/models"))
        await asyncio.sleep(0.2)
        with serving(port=int(url.rpartition(":")[2])):
            assert (await call)["data"][0]["id"] == "made-up"
        client.close()

    with serving() as url:
        pass
    asyncio.run(main(url))
