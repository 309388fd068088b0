"""Any server of the OpenAI completions protocol, as an engine whose weights somebody else sets.

The first use measures which distribution its log-probs are of (`semantics`); a reply that cannot be
trained from is refused (`reply`). Weights cannot be pushed; every span says the version that the
adapter was told the server holds.
"""

from __future__ import annotations

import asyncio
import os
import time
from array import array
from collections.abc import Sequence
from typing import Any

from trueup.engines.http import JsonClient
from trueup.engines.openai import reply as replies
from trueup.engines.openai.semantics import LogprobMode
from trueup.engines.openai.server import CompletionsServer
from trueup.engines.requests import demand_sound
from trueup.errors import EngineFault
from trueup.types import (
    Activity,
    Completion,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    LoadReceipt,
    Span,
    WeightManifest,
)


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
        self._server = CompletionsServer(client, vocab_size=vocab_size, mode=mode)
        self._engine_id = engine_id
        self._epoch = epoch
        self._slots = slots
        self._precision = precision
        self._vocab_size = vocab_size
        self._version = version
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
        """See `CompletionsServer.connect`; `generate` does it by itself."""
        return await self._server.connect()

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
        return await self._server.score(ids)

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
        self._server.close()

    async def _sample(self, request: GenerateRequest) -> replies.Sampled:
        mode = await self.connect()
        mode.demand(request.sampling)
        demand_sound(request, vocab_size=self._vocab_size, positions=self._server.context)
        return await self._server.sample(request.prompt_ids, request.sampling)

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
