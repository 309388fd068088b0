"""A response of vLLM's `/inference/v1/generate` as what was sampled, or a fault; nothing between.

Whatever a trainer would need to guess (a missing id or log-prob, a token without a version) makes
the turn an engine failure.
"""

from __future__ import annotations

import base64
import io
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trueup.errors import EngineFault
from trueup.types import FinishReason, GenerateRequest, Replay

_FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}
_LOWEST = -9999.0
"""vLLM's JSON for a log-prob of -inf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One turn as vLLM answered it."""

    token_ids: array[int]
    logps: array[float]
    versions: tuple[tuple[int, int, int], ...]
    """(version, start, stop) over the tokens."""
    finish: FinishReason
    cached: int
    """Prompt tokens found in the cache."""
    replay: Replay | None


def read(response: Mapping[str, Any], request: GenerateRequest) -> Reply:
    """Read a response to a request.

    Raises:
        EngineFault: Anything that was asked for is missing, or contradicts itself.
    """
    choices = response.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise EngineFault(field="vLLM choices", rule="one", value=str(response)[:300])
    (choice,) = choices
    ids = choice.get("token_ids")
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise EngineFault(field="vLLM token_ids", rule="a list of ids", value=ids)
    finish = _FINISH.get(choice.get("finish_reason"))
    if finish is None:
        raise EngineFault(
            field="vLLM finish_reason", rule=f"one of {[*_FINISH]}", value=choice["finish_reason"]
        )
    _check_end(ids, finish, request)
    return Reply(
        token_ids=array("i", ids),
        logps=_logps(choice.get("logprobs"), ids, forced=request.forced_ids is not None),
        versions=_versions(choice.get("weight_versions"), len(ids)),
        finish=finish,
        cached=_cached(response.get("usage")),
        replay=_replay(choice, len(request.prompt_ids), len(ids)),
    )


def _check_end(ids: Sequence[int], finish: FinishReason, request: GenerateRequest) -> None:
    """The stop token is the last one and only that; `length` means max_tokens."""
    stops = set(request.sampling.stop_ids)
    if stops.intersection(ids[:-1]) or (bool(ids) and ids[-1] in stops) != (
        finish is FinishReason.STOP
    ):
        raise EngineFault(
            field="vLLM token_ids",
            rule="with a stop id at the end if and only if that ended the turn",
            value=f"{finish} after {ids[-3:]}",
        )
    if finish is FinishReason.LENGTH and len(ids) != request.sampling.max_tokens:
        raise EngineFault(
            field="vLLM token_ids",
            rule=f"{request.sampling.max_tokens} long where the length ended the turn",
            value=len(ids),
        )
    if request.forced_ids is not None and list(request.forced_ids[: len(ids)]) != ids:
        raise EngineFault(field="vLLM token_ids", rule="as forced", value=ids)


def _logps(given: Any, ids: Sequence[int], *, forced: bool) -> array[float]:
    content = given.get("content") if isinstance(given, dict) else None
    if content is None and not ids:
        return array("f")
    if not isinstance(content, list) or len(content) != len(ids):
        count = len(content) if isinstance(content, list) else None
        raise EngineFault(
            field="vLLM logprobs", rule=f"one for each of {len(ids)} tokens", value=count
        )
    found = array("f")
    for token, entry in zip(ids, content, strict=True):
        logp = entry.get("logprob")
        if entry.get("token_id") != token or not isinstance(logp, float | int):
            raise EngineFault(field="vLLM logprobs", rule=f"of token {token}", value=entry)
        if logp <= _LOWEST and forced:
            logp = -math.inf
        elif not _LOWEST < logp <= 0:  # false for NaN
            raise EngineFault(field="vLLM logprobs", rule="finite and at most 0", value=logp)
        found.append(logp)
    return found


def _versions(spans: Any, count: int) -> tuple[tuple[int, int, int], ...]:
    """The labels of all tokens, as numbers, without gap or overlap."""
    found: list[tuple[int, int, int]] = []
    at = 0
    for span in spans if isinstance(spans, list) else ():
        version, start, end = span["version"], span["start"], span["end"]
        if not str(version).isdecimal() or start != at or end < start:
            raise EngineFault(
                field="vLLM weight_versions", rule="numbered spans without gap", value=spans
            )
        at = end
        if end > start:
            found.append((int(version), start, end))
    if at != count:
        raise EngineFault(
            field="vLLM weight_versions", rule=f"spans over {count} tokens", value=spans
        )
    return tuple(found)


def _cached(usage: Any) -> int:
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    return int(details.get("cached_tokens") or 0) if isinstance(details, dict) else 0


def _replay(choice: Mapping[str, Any], prompt: int, count: int) -> Replay | None:
    """The kept sets of truncated sampling and the routed experts, where the server returns them."""
    kept = choice.get("sampling_mask")
    if kept is not None and len(kept) != count:
        raise EngineFault(field="vLLM sampling_mask", rule=f"of {count} tokens", value=len(kept))
    routed = choice.get("routed_experts")
    if kept is None and routed is None:
        return None
    return Replay(
        kept_ids=None if kept is None else tuple(array("i", ids) for ids in kept),
        experts=None if routed is None else _experts(routed, prompt, count),
    )


def _experts(encoded: str, prompt: int, count: int) -> array[int]:
    """[n, layers, experts per token]: token i was computed from the position before it."""
    import numpy as np

    table = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    if table.ndim != 3 or len(table) != prompt + count - 1:
        raise EngineFault(
            field="vLLM routed_experts",
            rule=f"of the {prompt + count - 1} computed positions",
            value=table.shape,
        )
    rows = np.ascontiguousarray(table[prompt - 1 :], dtype=np.int16)
    return array("h", rows.tobytes())
