"""A server with vLLM's routes and a made-up model, in a thread, that can misbehave in any way."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]

CONFIG: Json = {
    "model_config": {
        "logprobs_mode": "processed_logprobs",
        "max_model_len": 256,
        "dtype": "torch.float32",
        "quantization": None,
        "logits_processors": ["trueup.engines.vllm.forcing:ForcedRows"],
    },
    "cache_config": {"block_size": 4, "enable_prefix_caching": True},
    "scheduler_config": {"max_num_seqs": 8},
    "parallel_config": {"worker_extension_cls": "trueup.engines.vllm.worker.Extension"},
    "weight_transfer_config": {"backend": "trueup"},
}


@dataclass
class FakeVllm:
    """The state of the server; as made, it behaves."""

    config: Json = field(default_factory=lambda: json.loads(json.dumps(CONFIG)))
    label: str = "default"
    token_s: float = 0.0
    """Per token."""
    cached: int = 0
    """Prompt tokens that it says it found."""
    spoil: Callable[[Json], object] = lambda response: None
    """Changes a response in place."""
    broken: Mapping[str, int] = field(default_factory=dict)
    """Route -> status that it answers instead."""
    silent: set[str] = field(default_factory=set)
    """Routes that never answer."""
    refused: str = ""
    """What staging a version ends with."""
    calls: list[tuple[str, Json]] = field(default_factory=list)
    paused: threading.Event = field(default_factory=threading.Event)
    aborted: set[str] = field(default_factory=set)
    staged: Json = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)

    def routes(self) -> list[str]:
        """What was asked for, in order, without sampling and watching."""
        return [route for route, _ in self.calls if route not in ("generate", "weight_info")]

    def answer(self, route: str, query: str, body: Json) -> tuple[int, Json | None]:
        self.calls.append((route, body))
        if route in self.silent:
            self.ended.wait()
        if route in self.broken:
            return self.broken[route], {"error": {"message": f"{route} is broken"}}
        found: Json | None = getattr(self, f"do_{route}")(query, body)
        return 200, found

    def do_server_info(self, query: str, body: Json) -> Json:
        return {"vllm_config": self.config}

    def do_weight_info(self, query: str, body: Json) -> Json:
        return {"weight_version": self.label}

    def do_collective_rpc(self, query: str, body: Json) -> Json:
        return {"results": [getattr(self, body["method"])(*body["args"])]}

    def trueup_connect(self) -> Json:
        return {"vocab_size": 40}

    def trueup_stage(self, manifest: str, quantize: str) -> Json:
        self.staged = json.loads(manifest)
        return {}

    def trueup_staged(self) -> Json:
        if self.refused:
            parts = {"kind": "transport", "field": "w", "rule": "whole", "value": 0}
            return {"error": {**parts, "message": self.refused}}
        return {
            "version": self.staged["version"],
            "digest": self.staged["digest"],
            "prepare_s": 0.25,
        }

    def trueup_cached(self, requests: str) -> Json:
        return {"tokens": 11 * len(json.loads(requests))}

    def do_pause(self, query: str, body: Json) -> Json:
        self.paused.set()
        return {}

    def do_resume(self, query: str, body: Json) -> Json:
        self.paused.clear()
        return {}

    def do_start_weight_update(self, query: str, body: Json) -> Json:
        assert self.paused.is_set(), "an update without a pause kills the real one"
        return {}

    def do_update_weights(self, query: str, body: Json) -> Json:
        assert self.paused.is_set()
        return {}

    def do_finish_weight_update(self, query: str, body: Json) -> Json:
        self.label = body["weight_version"]
        return {}

    def do_reset_prefix_cache(self, query: str, body: Json) -> Json:
        return {"success": True}

    def do_abort_requests(self, query: str, body: Json) -> None:
        self.aborted.update(body["request_ids"])

    def do_generate(self, query: str, body: Json) -> Json:
        sampling = body["sampling_params"]
        forced = (sampling.get("extra_args") or {}).get("trueup_forced_ids")
        name, ids, labels = f"generate-tokens-{body['request_id']}", [], []
        finish = "length"
        while len(ids) < sampling["max_tokens"]:
            time.sleep(self.token_s)
            while self.paused.is_set() and not self.ended.is_set():
                time.sleep(0.001)
            if name in self.aborted:
                finish = "abort"
                break
            ids.append(forced[len(ids)] if forced else (7 * len(ids) + 1) % 40)
            labels.append(self.label)
            if ids[-1] in sampling["stop_token_ids"]:
                finish = "stop"
                break
        response: Json = {
            "choices": [
                {
                    "index": 0,
                    "token_ids": ids,
                    "logprobs": {
                        "content": [{"token_id": i, "logprob": -0.5 - i / 64} for i in ids]
                    },
                    "finish_reason": finish,
                    "weight_versions": _spans(labels),
                    "sampling_mask": None,
                    "routed_experts": None,
                }
            ],
            "usage": {"prompt_tokens_details": {"cached_tokens": self.cached}},
        }
        self.spoil(response)
        return response


def _spans(labels: list[str]) -> list[Json]:
    starts = [i for i, label in enumerate(labels) if i == 0 or label != labels[i - 1]]
    ends = [*starts[1:], len(labels)]
    return [
        {"version": labels[start], "start": start, "end": end}
        for start, end in zip(starts, ends, strict=False)
    ]


@contextmanager
def serving(fake: FakeVllm) -> Iterator[str]:
    """Serve in a thread; yields the URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length) or b"{}")
            status, found = fake.answer(path.rsplit("/", 1)[-1], query, body)
            said = b"" if found is None else json.dumps(found).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)
            except ConnectionError:
                self.close_connection = True

        do_POST = do_GET  # noqa: N815

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        fake.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()
