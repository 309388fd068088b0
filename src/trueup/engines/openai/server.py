"""What is asked of a completions server, and how: every request that is ever sent to one.

Token ids go in and come out: no text is ever tokenised. Everything that a server could otherwise
default to (truncation, penalties, stopping at its own end of text) is asked for by value.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from trueup.engines.http import JsonClient
from trueup.engines.openai import reply as replies
from trueup.engines.openai.semantics import LogprobMode, measure
from trueup.errors import EngineFault
from trueup.types import SamplingParams

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
    # Here ignore_eos forbids the token, which changes the distribution.
    "llamacpp": {"ignore_eos": False},
}
"""What differs by `owned_by` of the server's models."""
_SILENT_AT_ZERO = frozenset({"llamacpp"})
"""Servers that return no log-probs at all when no alternatives are asked for."""
_ALTERNATIVES = 5
_SCORE_S = 120.0
_MODELS_S = 30.0


class CompletionsServer:
    """A server that serves one model, or the one named behind `#` in its address.

    Args:
        client: Of the server, owned by this object from now on.
        vocab_size: Ids are below it.
        mode: What its log-probs take into account; None: measured at the first use.
    """

    def __init__(
        self, client: JsonClient, *, vocab_size: int, mode: LogprobMode | None = None
    ) -> None:
        """Ask nothing yet."""
        self.context = 0
        """Most tokens of prompt and completion, once connected; 0: the server does not say."""
        self._client = client
        self._vocab_size = vocab_size
        self._mode = mode
        self._model = ""
        self._owner = ""
        self._root = "" if client.address.prefix.endswith("/v1") else "/v1"
        self._connecting = asyncio.Lock()

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

    async def sample(self, prompt: Sequence[int], sampling: SamplingParams) -> replies.Sampled:
        """One turn, when connected.

        Raises:
            EngineFault: No answer in time, or an unusable one.
        """
        found = await self._ask(self._body(prompt, sampling))
        return replies.read(found, prompt, sampling, vocab_size=self._vocab_size)

    async def score(self, ids: Sequence[int]) -> list[float]:
        """[n - 1] log-prob of every id but the first given those before it, when connected.

        Raises:
            EngineFault: No `prompt_logprobs`, or an unusable answer.
        """
        body = self._body(ids, SamplingParams(max_tokens=1, stop_ids=())) | {"prompt_logprobs": 0}
        return replies.prompt_logps(await self._ask(body, timeout_s=_SCORE_S), ids)

    def close(self) -> None:
        """Abandon every request; the server goes on."""
        self._client.close()

    async def _choose_model(self) -> None:
        found = await self._client.get(f"{self._root}/models", timeout_s=_MODELS_S)
        data = found.get("data") if isinstance(found, Mapping) else None
        cards = [card for card in data or [] if isinstance(card, Mapping) and card.get("id")]
        wanted = self._client.address.label
        chosen = [card for card in cards if card["id"] == wanted] if wanted else cards
        if len(chosen) != 1:
            raise EngineFault(
                field="engine server",
                rule="serving one model, or the one named behind # in engine.url",
                value=[card["id"] for card in cards],
            )
        self._model, self._owner = chosen[0]["id"], str(chosen[0].get("owned_by"))
        context = chosen[0].get("max_model_len")
        self.context = context if isinstance(context, int) else 0

    async def _observe(
        self, prompt: list[int], sampling: SamplingParams
    ) -> tuple[str, Mapping[str, float]]:
        found = await self._ask(self._body(prompt, sampling, alternatives=_ALTERNATIVES))
        replies.read(found, prompt, sampling, vocab_size=self._vocab_size)
        return replies.first_position(replies.choice_of(found))

    async def _ask(self, body: Mapping[str, Any], *, timeout_s: float | None = None) -> Any:
        return await self._client.post(f"{self._root}/completions", body, timeout_s=timeout_s)

    def _body(
        self, prompt: Sequence[int], sampling: SamplingParams, *, alternatives: int = 0
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
            "logprobs": max(alternatives, int(self._owner in _SILENT_AT_ZERO)),
        }
        return {**_NEUTRAL, **asked, **_DIALECTS.get(self._owner, {})}


def _seed(key: tuple[int, ...]) -> int:
    """31 bits: what every server takes."""
    packed = struct.pack(f"<{len(key)}q", *key)
    return int.from_bytes(hashlib.shake_128(packed).digest(4), "little") >> 1
