"""Any server of the OpenAI completions protocol, as an engine whose weights somebody else sets.

Token ids go in and come out: no text is ever tokenised. The adapter asks for everything that a
server could otherwise default to (truncation, penalties, stopping at its own end-of-text), and
refuses a reply that cannot be trained from. The first use measures which distribution the log-probs
are of (`semantics`). Weights cannot be pushed; every span says the version that the adapter was
told the server holds.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import struct
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.config import EngineConfig
from trueup.engines.http import Address, JsonClient
from trueup.engines.openai import reply as replies
from trueup.engines.openai.semantics import LogprobMode, measure
from trueup.engines.requests import demand_sound
from trueup.errors import CheckpointError, ConfigError, EngineFault
from trueup.types import (
    Activity,
    Completion,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    LoadReceipt,
    SamplingParams,
    Span,
    WeightManifest,
)

if TYPE_CHECKING:
    from torch import Tensor

_NEUTRAL = {
    "n": 1,
    "stream": False,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "ignore_eos": True,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "skip_special_tokens": False,
}
"""Everything else that a server, or the generation defaults of a model, could do to a sample."""
_DIALECTS: Mapping[str, Mapping[str, Any]] = {
    # Here ignore_eos forbids the token, which changes the distribution, and 0 means no log-probs.
    "llamacpp": {"ignore_eos": False, "logprobs": 1},
}
"""What differs by `owned_by` of the server's models."""
_SCORE_S = 120.0
_MODELS_S = 30.0


class OpenAIEngine:
    """Implements `engines.base.Engine` over HTTP; `load` is refused.

    Args:
        client: Of the server, owned by this engine from now on; its address may name the model
            behind `#`, otherwise the server must serve exactly one.
        engine_id: Goes into every span.
        epoch: How often it had been started.
        slots: Requests in flight at once.
        precision: Of the server's forward; nothing can verify it, it is what spans say.
        vocab_size: Ids are below it.
        version: Which weights the server holds.
        mode: What its log-probs take into account; None: measured at the first use.
    """

    def __init__(
        self,
        client: JsonClient,
        *,
        engine_id: str,
        epoch: int = 0,
        slots: int,
        precision: str,
        vocab_size: int,
        version: int = 0,
        mode: LogprobMode | None = None,
    ) -> None:
        """Ask nothing of the server yet."""
        self._client = client
        self._engine_id = engine_id
        self._epoch = epoch
        self._slots = slots
        self._precision = precision
        self._vocab_size = vocab_size
        self._version = version
        self._mode = mode
        self._model = ""
        self._dialect: Mapping[str, Any] = {}
        self._root = "" if client.address.prefix.endswith("/v1") else "/v1"
        self._path = f"{self._root}/completions"
        self._context = 0
        self._connecting = asyncio.Lock()
        self._closed = False
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._activity: list[Activity] = []

    async def info(self) -> EngineInfo:
        """See `Engine.info`; does not touch the server."""
        return EngineInfo(
            engine=self._engine_id,
            epoch=self._epoch,
            kind="openai",
            precision=self._precision,
            slots=self._slots,
            version=self._version,
            pid=os.getpid(),
            loads=False,
        )

    async def connect(self) -> LogprobMode:
        """Find the server's model and what its log-probs are of; once, then remembered.

        Raises:
            EngineFault: No server, several models and none named, a server without ids or
                log-probs, or with log-probs that follow no rule.
        """
        async with self._connecting:
            if not self._model:
                await self._choose_model()
            if self._mode is None:
                self._mode = await measure(self._observe, vocab_size=self._vocab_size)
            return self._mode

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`; cancelling it ends the request.

        An aborted turn has no tokens: what the server had sampled of it is not known.

        Raises:
            EngineFault: Also: a dead or silent server, an unusable reply, raw log-probs where the
                sampling parameters change the distribution, forced ids.
        """
        t_submit = time.monotonic()
        name = request.session
        self._demand_askable(request)
        turn = asyncio.create_task(self._sample(request))
        self._running[name] = turn
        try:
            sampled = await asyncio.shield(turn)
        except asyncio.CancelledError:
            if not turn.cancelled():  # the caller was cancelled, not the turn
                turn.cancel()
                raise
            sampled = None
        except EngineFault:
            if not self._closed:
                raise
            sampled = None
        finally:
            del self._running[name]
        completion = self._completion(request, sampled, t_submit)
        self._activity.append(
            Activity(
                t0=t_submit,
                t1=completion.t_end,
                tokens_decoded=len(completion.token_ids),
                tokens_prefilled=completion.tokens_prefilled,
                steps=len(completion.token_ids),
            )
        )
        return completion

    async def score(self, ids: Sequence[int]) -> list[float]:
        """[n - 1] log-prob of every id but the first given those before it, by one prefill.

        At temperature 1 without truncation, whatever the log-prob mode; for servers that offer
        `prompt_logprobs`.

        Raises:
            EngineFault: The server offers none, or the reply is unusable.
        """
        await self.connect()
        body = self._body(ids, _SCORE, logprobs=0) | {"prompt_logprobs": 0}
        found = await self._client.post(self._path, body, timeout_s=_SCORE_S)
        return replies.prompt_logps(found, ids)

    async def release(self, session: str) -> None:
        """See `Engine.release`."""
        if session in self._running:
            self._running[session].cancel()

    async def load(self, manifest: WeightManifest) -> LoadReceipt:
        """Refused: the protocol has no way to push weights.

        Raises:
            EngineFault: Always.
        """
        self._demand_open()
        raise EngineFault(
            field=f"engine {self._engine_id}",
            rule="of a kind that takes weights (embedded, vllm, transformers), to load a version",
            value="openai",
        )

    async def activity(self) -> list[Activity]:
        """See `Engine.activity`; one stretch per turn, since nothing is seen of it before."""
        found, self._activity = self._activity, []
        return found

    async def close(self) -> None:
        """See `Engine.close`; the server goes on."""
        self._closed = True
        for turn in self._running.values():
            turn.cancel()
        self._client.close()

    async def _choose_model(self) -> None:
        found = await self._client.get(f"{self._root}/models", timeout_s=_MODELS_S)
        data = found.get("data") if isinstance(found, Mapping) else None
        cards = [card for card in data or [] if isinstance(card, Mapping) and card.get("id")]
        wanted = self._client.address.label
        chosen = [card for card in cards if card["id"] == wanted] if wanted else cards
        if len(chosen) != 1:
            names = [card["id"] for card in cards]
            raise EngineFault(
                field="engine server",
                rule="serving one model, or the one named behind # in engine.url",
                value=names,
            )
        self._model = chosen[0]["id"]
        self._dialect = _DIALECTS.get(str(chosen[0].get("owned_by")), {})
        context = chosen[0].get("max_model_len")
        self._context = context if isinstance(context, int) else 0

    async def _sample(self, request: GenerateRequest) -> replies.Sampled:
        mode = await self.connect()
        sampling, prompt = request.sampling, list(request.prompt_ids)
        mode.demand(sampling)
        demand_sound(request, vocab_size=self._vocab_size, positions=self._context)
        found = await self._client.post(self._path, self._body(prompt, sampling, logprobs=0))
        return replies.read(found, prompt, sampling, vocab_size=self._vocab_size)

    async def _observe(
        self, prompt: list[int], sampling: SamplingParams
    ) -> tuple[str, Mapping[str, float]]:
        body = self._body(prompt, sampling, logprobs=5)
        found = await self._client.post(self._path, body)
        replies.read(found, prompt, sampling, vocab_size=self._vocab_size)
        return replies.first_position(replies.choice_of(found))

    def _body(
        self, prompt: Sequence[int], sampling: SamplingParams, *, logprobs: int
    ) -> dict[str, Any]:
        asked = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": list(sampling.stop_ids),
            "seed": _seed(sampling.key),
            "logprobs": logprobs,
        }
        return {**_NEUTRAL, **asked, **self._dialect}

    def _completion(
        self, request: GenerateRequest, sampled: replies.Sampled | None, t_submit: float
    ) -> Completion:
        sampling, prompt = request.sampling, len(request.prompt_ids)
        span = Span(
            start=0,
            stop=len(sampled.token_ids) if sampled else 0,
            version=self._version,
            engine=self._engine_id,
            epoch=self._epoch,
            precision=self._precision,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )
        return Completion(
            session=request.session,
            token_ids=sampled.token_ids if sampled else array("i"),
            logps=sampled.logps if sampled else array("f"),
            spans=(span,) if sampled else (),
            finish=sampled.finish if sampled else FinishReason.ABORT,
            tokens_prefilled=prompt - sampled.tokens_cached if sampled else 0,
            tokens_cached=sampled.tokens_cached if sampled else 0,
            tokens_recomputed=0,
            t_submit=t_submit,
            t_start=t_submit,
            t_end=time.monotonic(),
        )

    def _demand_open(self) -> None:
        if self._closed:
            raise EngineFault(field=f"engine {self._engine_id}", rule="open", value="closed")

    def _demand_askable(self, request: GenerateRequest) -> None:
        self._demand_open()
        name = request.session
        if name in self._running:
            raise EngineFault(
                field=f"session {name}", rule="without a turn in progress", value=name
            )
        demand_sound(request, vocab_size=self._vocab_size)


_SCORE = SamplingParams(max_tokens=1, stop_ids=())


def _seed(key: tuple[int, ...]) -> int:
    """31 bits: what every server takes."""
    packed = struct.pack(f"<{len(key)}q", *key)
    return int.from_bytes(hashlib.shake_128(packed).digest(4), "little") >> 1


def build(
    config: EngineConfig,
    *,
    model: Path,
    engine_id: str,
    epoch: int,
    fetch: Callable[[WeightManifest], dict[str, Tensor]],
    digest: Callable[[Mapping[str, Tensor]], str],
    paced: bool,
) -> OpenAIEngine:
    """See `engines.table.Build`; neither `fetch` nor `digest` is used.

    The environment variable TRUEUP_ENGINE_TOKEN holds a bearer token, TRUEUP_ENGINE_PLAIN_HTTP
    the hosts, separated by commas, that may be spoken to without encryption.

    Raises:
        ConfigError: No URL, or one that is not allowed; a setting that only the server has.
        CheckpointError: The directory does not say how large the vocabulary is.
    """
    for field, wrong, rule, value in (
        ("engine.url", not config.url, "the address of a server", config.url),
        ("engine.kv_mode", config.kv_mode == "keep", "recompute: weights never change", "keep"),
        ("engine.float32_head", config.float32_head, "set where the server is started", True),
        ("engine.prefix_cache", not config.prefix_cache, "set where the server is started", False),
        ("engine.kind", paced, "embedded, for a run on logical time", "openai"),
    ):
        if wrong:
            raise ConfigError(field=field, rule=f"{rule} (openai)", value=value)
    plain = [host for host in os.environ.get("TRUEUP_ENGINE_PLAIN_HTTP", "").split(",") if host]
    client = JsonClient(
        Address.parse(config.url, plain_http=plain),
        token=os.environ.get("TRUEUP_ENGINE_TOKEN", ""),
        connections=config.slots,
    )
    return OpenAIEngine(
        client,
        engine_id=engine_id,
        epoch=epoch,
        slots=config.slots,
        precision=config.precision,
        vocab_size=_vocab_size(model),
    )


def _vocab_size(model: Path) -> int:
    try:
        found = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            field=f"{model}/config.json", rule="readable JSON", value=repr(error)
        ) from error
    size = found.get("vocab_size", (found.get("text_config") or {}).get("vocab_size"))
    if not isinstance(size, int) or size < 1:
        raise CheckpointError(field=f"{model}/config.json: vocab_size", rule=">= 1", value=size)
    return size
