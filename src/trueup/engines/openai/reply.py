"""Reading the reply of a completions server, and refusing what cannot be trained from.

Servers differ in where they put ids and log-probs, which is seen in the reply itself:

- vLLM, SGLang: `choice.token_ids` (asked for by `return_token_ids`) beside
  `choice.logprobs.token_logprobs`;
- llama.cpp: `choice.logprobs.content`, one record per token with `id` and `logprob`;
- `choice.logprobs.tokens` as `token_id:<n>` (`return_tokens_as_token_ids`). Texts are never turned
  into ids: different tokens can have equal texts.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trueup.errors import EngineFault
from trueup.types import FinishReason, SamplingParams

_IMPOSSIBLE = -9000.0
"""Log-probs from here down stand for -inf (vLLM writes -9999): a sampled token had one above."""
_CERTAIN_TOKENS = 16
"""So many tokens of probability exactly 1 in a row, untruncated, are a field filled with zeros."""
_ROUNDING = 1e-4
"""How far above 0 a log-prob may be rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What a server sampled."""

    token_ids: array[int]
    logps: array[float]
    finish: FinishReason
    tokens_cached: int
    """Prompt tokens that the server says it had cached."""


def read(
    reply: Any, prompt: Sequence[int], sampling: SamplingParams, *, vocab_size: int = 0
) -> Sampled:
    """The tokens of a reply to one prompt.

    Args:
        reply: Decoded JSON.
        prompt: What was asked.
        sampling: How.
        vocab_size: Ids are below it; 0: not known.

    Raises:
        EngineFault: Ids or log-probs are missing, of different number, or none; a log-prob is not
            one that a sampled token can have; the server read another prompt; the turn ended for
            no reason that was asked for.
    """
    choice = choice_of(reply)
    ids = _ids(choice)
    logps = _logps(choice)
    if len(ids) != len(logps) or not ids:
        raise EngineFault(
            field="reply.logprobs", rule="one per token id, at least one", value=len(logps)
        )
    for token in ids:
        if token < 0 or (vocab_size and token >= vocab_size):
            raise EngineFault(
                field="reply.token_ids", rule=f"in [0, {vocab_size or 'vocabulary'})", value=token
            )
    _demand_logps(logps, truncated=sampling.top_p < 1 or sampling.top_k > 0)
    _demand_prompt(reply, choice, prompt)
    return Sampled(
        token_ids=array("i", ids),
        logps=array("f", logps),
        finish=_finish(choice, ids, sampling),
        tokens_cached=_cached(reply, len(prompt)),
    )


def choice_of(reply: Any) -> Mapping[str, Any]:
    """The one choice of a reply.

    Raises:
        EngineFault: It has none, or several.
    """
    choices = reply.get("choices") if isinstance(reply, Mapping) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise EngineFault(field="reply.choices", rule="one choice", value=_short(reply))
    return choices[0]


def first_position(choice: Mapping[str, Any]) -> tuple[str, dict[str, float]]:
    """The first sampled token by name, and log-prob by name of it and of the listed alternatives.

    A name is whatever the server calls a token by: good for comparing two replies, not for more.
    """
    logprobs = choice.get("logprobs") or {}
    content = logprobs.get("content")
    if isinstance(content, list) and content:
        first = content[0]
        listed = {str(_id(one)): one.get("logprob") for one in first.get("top_logprobs") or []}
        name, logp = str(_id(first)), first.get("logprob")
    else:
        tops = logprobs.get("top_logprobs")
        listed = dict(tops[0] or {}) if isinstance(tops, list) and tops else {}
        name, logp = str((logprobs.get("tokens") or [""])[0]), _logps(choice)[0]
    possible = {
        str(other): float(value)
        for other, value in listed.items()
        if isinstance(value, int | float) and value > _IMPOSSIBLE
    }
    return name, possible | {name: float(logp)}


def prompt_logps(reply: Any, ids: Sequence[int]) -> list[float]:
    """[n - 1] log-prob of every prompt id but the first, from `prompt_logprobs`.

    Raises:
        EngineFault: The server returns none, of another prompt, or not finite ones.
    """
    choice = choice_of(reply)
    listed = choice.get("prompt_logprobs")
    if not isinstance(listed, list) or len(listed) != len(ids):
        raise EngineFault(
            field="reply.prompt_logprobs", rule="one per prompt id", value=_short(listed)
        )
    found = []
    for token, one in zip(ids[1:], listed[1:], strict=True):
        logp = one.get(str(token), {}).get("logprob") if isinstance(one, Mapping) else None
        if not isinstance(logp, int | float) or not _IMPOSSIBLE < logp <= _ROUNDING:
            raise EngineFault(
                field=f"reply.prompt_logprobs of token {token}", rule="finite", value=_short(one)
            )
        found.append(float(logp))
    return found


def _ids(choice: Mapping[str, Any]) -> list[int]:
    ids = choice.get("token_ids")
    logprobs = choice.get("logprobs") or {}
    if ids is None and isinstance(logprobs.get("content"), list):
        ids = [_id(one) for one in logprobs["content"]]
    if ids is None and isinstance(logprobs.get("tokens"), list):
        ids = [_named_id(text) for text in logprobs["tokens"]]
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        raise EngineFault(
            field="reply.token_ids",
            rule="the sampled ids (a server that supports return_token_ids)",
            value=_short(ids),
        )
    return ids


def _id(record: Mapping[str, Any]) -> Any:
    return record.get("id", record.get("token_id"))


def _logps(choice: Mapping[str, Any]) -> list[float]:
    logprobs = choice.get("logprobs")
    listed: Any = None
    if isinstance(logprobs, Mapping):
        listed = logprobs.get("token_logprobs")
        if listed is None and isinstance(logprobs.get("content"), list):
            listed = [one.get("logprob") for one in logprobs["content"]]
    if not isinstance(listed, list):
        raise EngineFault(
            field="reply.logprobs", rule="the log-probs of the sampled ids", value=_short(listed)
        )
    for logp in listed:
        if isinstance(logp, bool) or not isinstance(logp, int | float):
            raise EngineFault(field="reply.logprobs", rule="numbers", value=logp)
    return [float(logp) for logp in listed]


def _demand_logps(logps: Sequence[float], *, truncated: bool) -> None:
    for logp in logps:
        if math.isnan(logp) or not _IMPOSSIBLE < logp <= _ROUNDING:
            raise EngineFault(
                field="reply.logprobs", rule="those of tokens that can be sampled", value=logp
            )
    if not truncated and len(logps) >= _CERTAIN_TOKENS and not any(logps):
        raise EngineFault(
            field="reply.logprobs", rule="not all exactly 0", value=f"{len(logps)} zeros"
        )


def _demand_prompt(
    reply: Mapping[str, Any], choice: Mapping[str, Any], asked: Sequence[int]
) -> None:
    """The server must have read the ids that were sent: no BOS put before them, none cut off."""
    read_ids = choice.get("prompt_token_ids")
    if isinstance(read_ids, list) and read_ids != list(asked):
        raise EngineFault(
            field="reply.prompt_token_ids", rule="the ids that were sent", value=_short(read_ids)
        )
    counted = (reply.get("usage") or {}).get("prompt_tokens")
    if isinstance(counted, int) and counted != len(asked):
        raise EngineFault(field="reply.usage.prompt_tokens", rule=f"{len(asked)}", value=counted)


def _finish(
    choice: Mapping[str, Any], ids: Sequence[int], sampling: SamplingParams
) -> FinishReason:
    """Why the turn ended, by the ids: a token that was not sampled must not end it."""
    said = choice.get("finish_reason")
    stops = set(sampling.stop_ids)
    early = next((i for i, token in enumerate(ids[:-1]) if token in stops), None)
    if early is not None:
        raise EngineFault(
            field="reply.token_ids",
            rule="ended by the first stop id (a server that supports stop_token_ids)",
            value=f"stop id {ids[early]} at {early} of {len(ids)}",
        )
    if said in ("stop", "length") and ids[-1] in stops:
        return FinishReason.STOP
    if said == "length" and len(ids) == sampling.max_tokens:
        return FinishReason.LENGTH
    raise EngineFault(
        field="reply.finish_reason",
        rule=f"stop at a sampled stop id, or length at {sampling.max_tokens} tokens",
        value=f"{said} at {len(ids)} tokens, last {ids[-1]}",
    )


def _cached(reply: Mapping[str, Any], prompt: int) -> int:
    details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return min(cached, prompt) if isinstance(cached, int) and cached > 0 else 0


def _named_id(text: Any) -> int | None:
    name, _, digits = str(text).partition(":")
    return int(digits) if name == "token_id" and digits.isdecimal() else None


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 200 else shown[:200] + "..."
