"""What every engine asks of a request before it looks at it."""

from __future__ import annotations

from trueup.errors import EngineFault
from trueup.types import GenerateRequest


def demand_sound(
    request: GenerateRequest, *, vocab_size: int, positions: int = 0, forces: bool = False
) -> None:
    """Refuse a request that no model of this size can serve.

    Args:
        request: Of any session.
        vocab_size: Ids are below it.
        positions: Most tokens of prompt and completion together; 0: not known.
        forces: Whether the engine decodes forced ids.

    Raises:
        EngineFault: No prompt or one that does not fit, ids out of range, sampling parameters
            without a distribution, forced ids of another number than max_tokens.
    """
    name, sampling, forced = request.session, request.sampling, request.forced_ids
    length = len(request.prompt_ids)
    if not length or (positions and length + sampling.max_tokens > positions):
        raise EngineFault(
            field=f"session {name}: prompt and max_tokens",
            rule=f"between 1 and {positions} tokens in all" if positions else "at least 1 token",
            value=(length, sampling.max_tokens),
        )
    for field, ids in (("prompt_ids", request.prompt_ids), ("forced_ids", forced)):
        low, high = (min(ids), max(ids)) if ids else (0, 0)
        if low < 0 or high >= vocab_size:
            raise EngineFault(
                field=f"session {name}: {field}",
                rule=f"in [0, {vocab_size})",
                value=low if low < 0 else high,
            )
    if sampling.max_tokens < 1 or not sampling.temperature > 0 or not 0 < sampling.top_p <= 1:
        raise EngineFault(
            field=f"session {name}: sampling",
            rule="of max_tokens >= 1, temperature > 0 and 0 < top_p <= 1",
            value=sampling,
        )
    if forced is not None and not (forces and len(forced) == sampling.max_tokens):
        rule = (
            f"max_tokens ({sampling.max_tokens}) in number" if forces else "none: it only samples"
        )
        raise EngineFault(field=f"session {name}: forced_ids", rule=rule, value=len(forced))
