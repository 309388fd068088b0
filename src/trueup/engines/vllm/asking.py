"""How a turn is asked for."""

from __future__ import annotations

import hashlib
from typing import Any

from trueup.engines.vllm import wire
from trueup.types import GenerateRequest, SamplingParams


def body(turn: str, request: GenerateRequest, *, salt: str) -> dict[str, Any]:
    """A request of `/inference/v1/generate`: everything that decides the distribution is said.

    Args:
        turn: Id by which it can be aborted.
        request: Sound.
        salt: Of the prefix cache: only prefixes cached under the same one are found.
    """
    sampling = request.sampling
    parameters: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": _seed(sampling),
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    if request.forced_ids is not None:
        parameters["extra_args"] = {wire.FORCED: list(request.forced_ids)}
    return {
        "request_id": turn,
        "token_ids": list(request.prompt_ids),
        "sampling_params": parameters,
        "cache_salt": salt,
    }


def _seed(sampling: SamplingParams) -> int:
    """63 bits of the key: equal keys seed equal noise."""
    key = hashlib.blake2b(repr(tuple(sampling.key)).encode(), digest_size=8).digest()
    return int.from_bytes(key, "little") >> 1
