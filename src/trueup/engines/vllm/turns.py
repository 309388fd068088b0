"""What is known of a turn's provenance: which weights sampled it, and which wrote what it read.

vLLM says which version sampled each token and how much of the prompt it found in its cache. What a
session had cached before, and whether that was of other weights, is remembered here.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trueup.engines.vllm.reply import Reply
from trueup.types import KVState, Span


@dataclass(slots=True)
class Session:
    """What the turns of an episode computed so far."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    """Ids whose keys and values were computed: all but the last sample."""
    version: int = -1
    """Under which they can be found again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Of one turn."""

    spans: tuple[Span, ...]
    prefilled: int
    recomputed: int


def provenance(
    session: Session,
    prompt: Sequence[int],
    reply: Reply,
    *,
    sent_at: int,
    keep: bool,
    block: int,
    template: Span,
) -> Provenance:
    """Say where a turn comes from, and remember it in its session.

    Args:
        session: Of the turns before; changed.
        prompt: Ids before the first sample.
        reply: What vLLM answered.
        sent_at: Version that was served when the request was sent: the salt of its cache.
        keep: Running turns keep their keys and values at an update.
        block: Tokens of a cache block; 0: nothing is cached between turns.
        template: A span with everything that all spans of the turn share.
    """
    known = _common_prefix(session.ids, prompt)
    # What vLLM would have found in its cache, had the weights not changed.
    held = known // block * block if block else 0
    stale = held > reply.cached and session.version != sent_at
    first = KVState.RECOMPUTED if stale else KVState.FRESH
    spans: list[Span] = []
    writers = [sent_at]
    recomputed = held - reply.cached if stale else 0
    prefilled = len(prompt) - reply.cached - recomputed
    for version, start, stop in reply.versions:
        state = KVState.RECOMPUTED if spans else first
        context: tuple[int, ...] = ()
        if version != writers[-1]:
            writers.append(version)
            # A prompt may have been computed before the first sample that names a version.
            if not keep and start:
                recomputed += len(prompt) + start - 1
        if keep and len(writers) > 1:
            state, context = KVState.KEPT, tuple(writers)
        spans.append(
            replace(
                template,
                start=start,
                stop=stop,
                version=version,
                kv=state,
                context_versions=context,
            )
        )
    session.ids = array("i", [*prompt, *reply.token_ids[:-1]])
    session.version = sent_at
    return Provenance(spans=tuple(spans), prefilled=prefilled, recomputed=recomputed)


def _common_prefix(cached: Sequence[int], prompt: Sequence[int]) -> int:
    """Leading prompt ids that were computed; the last one never counts: its logits are needed."""
    most = min(len(cached), len(prompt) - 1)
    return next((i for i in range(most) if cached[i] != prompt[i]), most)
