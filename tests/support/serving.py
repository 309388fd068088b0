"""Any engine behind the completions protocol, on the loopback."""

from __future__ import annotations

import asyncio
import json
import threading
from array import array
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

from trueup.engines.base import Engine
from trueup.types import Completion, GenerateRequest, SamplingParams


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, engine: Engine, vocabulary: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.engine = engine
        self.vocabulary = vocabulary
        self.sessions = count()
        self.loop = asyncio.new_event_loop()

    def wait_for(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer as a server does that puts the ids beside the log-probs."""
        sampling = SamplingParams(
            max_tokens=body["max_tokens"],
            stop_ids=tuple(body["stop_token_ids"]),
            temperature=body["temperature"],
            top_p=body["top_p"],
            top_k=max(body["top_k"], 0),
            key=(body["seed"],),
        )
        said = await self.ask(body["prompt"], sampling)
        tops = None
        if body["logprobs"] and body["max_tokens"] == 1:
            tops = [await self.alternatives(body["prompt"], sampling, said)]
        return {
            "choices": [
                {
                    "finish_reason": str(said.finish),
                    "token_ids": list(said.token_ids),
                    "prompt_token_ids": body["prompt"],
                    "logprobs": {
                        "tokens": [f"token_id:{token}" for token in said.token_ids],
                        "token_logprobs": list(said.logps),
                        "top_logprobs": tops,
                    },
                }
            ]
        }

    async def ask(
        self, prompt: list[int], sampling: SamplingParams, forced: array[int] | None = None
    ) -> Completion:
        session = f"s{next(self.sessions)}"
        try:
            return await self.engine.generate(
                GenerateRequest(
                    session=session,
                    prompt_ids=array("i", prompt),
                    sampling=sampling,
                    forced_ids=forced,
                )
            )
        finally:
            await self.engine.release(session)

    async def alternatives(
        self, prompt: list[int], sampling: SamplingParams, said: Completion
    ) -> dict[str, float]:
        """What the engine says of every token of its small vocabulary."""
        every = [
            await self.ask(prompt, sampling, array("i", [token]))
            for token in range(self.vocabulary)
        ]
        found = {f"token_id:{i}": max(c.logps[0], -9999.0) for i, c in enumerate(every)}
        return found | {f"token_id:{said.token_ids[0]}": said.logps[0]}


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self._send({"data": [{"id": "tiny", "max_model_len": 256}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._send(self.server.wait_for(self.server.reply(body)))

    def _send(self, content: dict[str, Any]) -> None:
        encoded = json.dumps(content).encode()
        try:
            self.send_response(200)
            self.send_header("Content-Length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)
        except OSError:  # the client has gone
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def serving(engine: Engine, *loads: Any, vocabulary: int) -> Iterator[str]:
    """The URL of a server that answers with an engine, which is closed at the end.

    Args:
        engine: Anything behind the port; it lives in a thread of the server.
        loads: Manifests of versions to load first.
        vocabulary: Ids are below it.
    """
    server = _Server(engine, vocabulary)
    threads = [
        threading.Thread(target=run, args=args, daemon=True)
        for run, args in ((server.loop.run_forever, ()), (server.serve_forever, (0.01,)))
    ]
    for thread in threads:
        thread.start()
    try:
        for manifest in loads:
            server.wait_for(engine.load(manifest))
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.wait_for(engine.close())
        server.shutdown()
        server.server_close()
        server.loop.call_soon_threadsafe(server.loop.stop)
        for thread in threads:
            thread.join()
        server.loop.close()
