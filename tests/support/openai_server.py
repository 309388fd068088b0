"""A completions server of a made-up model, in a thread, that can misbehave in any way."""

import json
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VOCABULARY = 40
CACHE_BLOCK = 7
"""Prompts are cached in whole blocks of so many tokens."""

Json = dict[str, Any]


@dataclass
class Behaviour:
    """How the server answers; as made, the way it should."""

    processed: bool = True
    processed_top_p: bool = True
    spread: float = 3.0
    """Standard deviation of the logits."""
    noise: float = 0.0
    """Standard deviation of what each forward adds to its logits."""
    listed: bool = True
    """Whether alternatives are listed."""
    token_s: float = 0.0
    """Per token."""
    status: int = 200
    change: Callable[[Json], object] = lambda reply: None
    """Spoils a reply in place."""
    raw: bytes | None = None
    """Sent instead of a reply."""
    hang: threading.Event | None = None
    """Waited for before an answer."""
    models: list[Json] = field(default_factory=lambda: [{"id": "made-up", "max_model_len": 256}])
    owner: str = "vllm"
    spoil_probes: bool = False
    """Misbehave from the first request on, not only when several tokens are asked for."""
    requests: list[Json] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    cached: set[tuple[int, ...]] = field(default_factory=set)


def logits(context: tuple[int, ...], spread: float) -> list[float]:
    """[V] of the made-up model: the last two ids decide."""
    rng = random.Random(repr(context[-2:]))
    return [rng.gauss(0, spread) for _ in range(VOCABULARY)]


def log_softmax(values: list[float]) -> list[float]:
    top = max(values)
    total = math.log(sum(math.exp(value - top) for value in values)) + top
    return [value - total for value in values]


def distribution(body: Json, scores: list[float]) -> list[float]:
    """[V] log-probs after temperature and truncation; -inf outside the support."""
    logps = log_softmax([z / body["temperature"] for z in scores])
    order = sorted(range(VOCABULARY), key=lambda token: -logps[token])
    if body["top_k"] > 0:
        order = order[: body["top_k"]]
    before, kept = 0.0, []
    for token in order:
        if before >= body["top_p"] and kept:
            break
        kept.append(token)
        before += math.exp(logps[token])
    masked = [-math.inf] * VOCABULARY
    for token, logp in zip(kept, log_softmax([logps[token] for token in kept]), strict=True):
        masked[token] = logp
    return masked


def complete(behaviour: Behaviour, body: Json) -> Json:
    """The reply of a server that behaves."""
    prompt = tuple(body["prompt"])
    rng = random.Random(repr((prompt, body["seed"])))
    known = 0
    for size in range(CACHE_BLOCK, len(prompt), CACHE_BLOCK):
        known = size if prompt[:size] in behaviour.cached else known
    context, ids, logps, tops = prompt, [], [], []
    finish = "length"
    while len(ids) < body["max_tokens"]:
        time.sleep(behaviour.token_s)
        noisy = [z + rng.gauss(0, behaviour.noise) for z in logits(context, behaviour.spread)]
        sampled_from = distribution(body, noisy)
        shown = sampled_from if behaviour.processed else log_softmax(noisy)
        if not behaviour.processed_top_p:
            shown = distribution(body | {"top_p": 1.0, "top_k": -1}, noisy)
        weights = [math.exp(logp) for logp in sampled_from]
        token = rng.choices(range(VOCABULARY), weights)[0]
        best = sorted(range(VOCABULARY), key=lambda t: -shown[t])[: body["logprobs"]]
        tops.append(
            {f"token_id:{t}": max(shown[t], -9999.0) for t in {*best, token}}
            if behaviour.listed
            else None
        )
        ids.append(token)
        logps.append(shown[token])
        context = (*context, token)
        if token in body["stop_token_ids"]:
            finish = "stop"
            break
    for size in range(CACHE_BLOCK, len(context), CACHE_BLOCK):
        behaviour.cached.add(context[:size])
    choice: Json = {
        "index": 0,
        "text": "",
        "finish_reason": finish,
        "token_ids": ids,
        "prompt_token_ids": list(prompt),
        "logprobs": {
            "tokens": [f"token_id:{token}" for token in ids],
            "token_logprobs": logps,
            "top_logprobs": tops,
        },
    }
    if body.get("prompt_logprobs") is not None:
        tables = [log_softmax(logits(prompt[:i], behaviour.spread)) for i in range(len(prompt))]
        choice["prompt_logprobs"] = [
            {str(token): {"logprob": table[token]}} if i else None
            for i, (token, table) in enumerate(zip(prompt, tables, strict=True))
        ]
    return {
        "choices": [choice],
        "usage": {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": known}},
    }


class _Handler(BaseHTTPRequestHandler):
    server: "_Server"

    def do_GET(self) -> None:
        models = [card | {"owned_by": self.server.behaviour.owner} for card in self._models()]
        self._send(200, json.dumps({"data": models}).encode())

    def do_POST(self) -> None:
        behaviour = self.server.behaviour
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        behaviour.requests.append(body)
        behaviour.headers.append(dict(self.headers))
        if body["max_tokens"] == 1 and not behaviour.spoil_probes:
            self._send(200, json.dumps(complete(behaviour, body)).encode())
            return
        if behaviour.hang is not None:
            behaviour.hang.wait()
        if behaviour.raw is not None or behaviour.status != 200:
            self._send(behaviour.status, behaviour.raw if behaviour.raw is not None else b"no")
            return
        reply = complete(behaviour, body)
        behaviour.change(reply)
        self._send(200, json.dumps(reply).encode())

    def _models(self) -> list[Json]:
        return self.server.behaviour.models

    def _send(self, status: int, content: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:  # the client has gone
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, behaviour: Behaviour, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.behaviour = behaviour

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving(behaviour: Behaviour | None = None, *, port: int = 0) -> Iterator[str]:
    """The URL of a server that runs until the end."""
    server = _Server(behaviour or Behaviour(), port)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.url
    finally:
        if server.behaviour.hang is not None:
            server.behaviour.hang.set()
        server.shutdown()
        server.server_close()
        thread.join()
