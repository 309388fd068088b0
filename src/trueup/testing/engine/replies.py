"""Is what comes back whole: ids, log-probs, and the reason why a reply ended?"""

from __future__ import annotations

import math
from collections.abc import Callable

from trueup.testing.engine.finding import Check, Finding
from trueup.testing.engine.statistics import same_proportion
from trueup.testing.engine.subject import REPLIES, REPLY_TOKENS, Subject
from trueup.types import Completion, FinishReason

_CERTAINTY = 1e-6


async def _ids_and_logprobs(subject: Subject) -> Finding:
    """At twice the temperature no token is certain, so that a log-prob of 0 is a filled-in one."""
    said = await subject.ask_all(
        subject.prompts(REPLIES, 8, "whole"), REPLY_TOKENS, temperature=2.0
    )
    tokens = sum(len(reply.token_ids) for reply in said)
    wrong = {
        "replies without as many log-probs as ids": sum(
            len(reply.token_ids) != len(reply.logps) or not reply.token_ids for reply in said
        ),
        "ids outside the vocabulary": sum(
            not 0 <= token < subject.vocabulary for reply in said for token in reply.token_ids
        ),
        "log-probs that are not finite": _count(said, lambda x: not math.isfinite(x)),
        "log-probs above 0": _count(said, lambda x: x > 1e-4),
        "log-probs of exactly 0": _count(said, lambda x: x == 0),
    }
    found = ", ".join(f"{count} {what}" for what, count in wrong.items() if count)
    return Finding(ok=not found, measured=f"{found or 'none missing'} ({tokens} tokens)")


def _count(said: list[Completion], is_wrong: Callable[[float], bool]) -> int:
    return sum(is_wrong(logp) for reply in said for logp in reply.logps)


async def _provenance(subject: Subject) -> Finding:
    """Spans cover the reply, repeat what was asked, and name what the engine says it serves."""
    prompt = subject.prompts(1, 8, "provenance")[0]
    reply = await subject.ask(prompt, 8, temperature=1.5)
    served = (await subject.engine.info()).version
    cover = [(span.start, span.stop) for span in reply.spans]
    told = {(span.version, span.temperature, span.top_p, span.top_k) for span in reply.spans}
    ok = cover == [(0, len(reply.token_ids))] and told == {(served, 1.5, 1.0, 0)}
    return Finding(
        ok=ok,
        measured=f"spans {cover} of {len(reply.token_ids)} tokens that name (version, temperature, "
        f"top_p, top_k) {sorted(told)}; the engine says that it serves {served}",
    )


async def _truncation(subject: Subject) -> Finding:
    """A reply stops at its third token as often whether that is the last one allowed or not."""
    prompts = subject.prompts(REPLIES, 8, "truncation")
    cut = await subject.ask_all(prompts, 3, stops=True)
    free = await subject.ask_all(prompts, 6, stops=True)
    wrong = [
        f"{len(reply.token_ids)} tokens and {reply.finish} where {most} are allowed"
        for replies, most in ((cut, 3), (free, 6))
        for reply in replies
        if len(reply.token_ids) > most
        or (reply.finish is FinishReason.LENGTH and len(reply.token_ids) != most)
        or (reply.finish is FinishReason.STOP) is not (reply.token_ids[-1] == subject.stop_id)
    ]
    ended, ended_free = (sum(_stops_at(reply, 3) for reply in said) for said in (cut, free))
    chance = same_proportion(ended, len(cut), ended_free, len(free))
    return Finding(
        ok=not wrong and chance > _CERTAINTY,
        measured=f"{ended} of {len(cut)} replies stop at their third token where three are "
        f"allowed, {ended_free} of {len(free)} where six are (p = {chance:.1g})"
        + "".join(f"; {one}" for one in wrong[:3]),
    )


def _stops_at(reply: Completion, length: int) -> bool:
    return reply.finish is FinishReason.STOP and len(reply.token_ids) == length


CHECKS = (
    Check(
        name="ids_and_logprobs",
        expected="one finite log-prob below 0 for every sampled id, at temperature 2",
        usually="log-probs are not asked for, or missing ones are filled with 0",
        false_alarm="none",
        run=_ids_and_logprobs,
    ),
    Check(
        name="provenance",
        expected="spans over all tokens, with the version that is served and what was asked",
        usually="a label that is set by a client or a counter, and not where tokens are sampled",
        false_alarm="none, unless something else loads weights meanwhile",
        run=_provenance,
    ),
    Check(
        name="truncation_is_reported",
        expected="replies that are cut off to end with `length`, and a stop token only where it "
        "was sampled",
        usually="a stop token is appended to replies that were cut off",
        false_alarm="1e-6",
        run=_truncation,
    ),
)
