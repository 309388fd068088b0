"""Does a distribution depend on what was computed before, or is computed beside?"""

from __future__ import annotations

import asyncio
import statistics

from trueup.testing.engine.finding import Check, Finding
from trueup.testing.engine.statistics import Draws, lifts
from trueup.testing.engine.subject import Subject, firsts
from trueup.testing.protocol import NotExpressible

_NOISE = {"float32": 1e-3, "bfloat16": 0.15}
"""Mean |difference| in nats of two forwards of the same tokens: several times what is usual."""
_QUANTISED = 0.8
_PROMPTS, _DRAWS, _LENGTH = 4, 24, 160
"""The length fills a block of any prefix cache."""
_COOL = 0.7


def _noise(precision: str) -> float:
    return _NOISE.get(precision, _QUANTISED)


async def _prefix_cache(subject: Subject) -> Finding:
    """What the first readers of a prompt are told of a token, and what later ones are."""
    prompts = [p for p in subject.prompts(_PROMPTS, _LENGTH, "prefix") for _ in range(_DRAWS)]
    computed = await subject.ask_all(prompts, 1, temperature=_COOL)
    cached = await subject.ask_all(prompts, 1, temperature=_COOL)
    return _compared(subject, firsts(computed, _DRAWS), firsts(cached, _DRAWS))


async def _batch(subject: Subject) -> Finding:
    """What is told of a token alone, and beside others."""
    prompts = [p for p in subject.prompts(_PROMPTS, 24, "batch") for _ in range(_DRAWS)]
    alone = [await subject.ask(prompt, 1, temperature=_COOL) for prompt in prompts]
    beside, _ = await asyncio.gather(
        subject.ask_all(prompts, 1, temperature=_COOL),
        subject.ask_all(subject.prompts(len(prompts), 40, "neighbours"), 4),
    )
    return _compared(subject, firsts(alone, _DRAWS), firsts(beside, _DRAWS))


def _compared(subject: Subject, one: list[Draws], other: list[Draws]) -> Finding:
    off = [abs(x) for a, b in zip(one, other, strict=True) for x in lifts(a, b)]
    if len(off) < _PROMPTS:
        raise NotExpressible(f"only {len(off)} tokens came twice")
    mean, limit = statistics.fmean(off), _noise(subject.info.precision)
    return Finding(
        ok=mean <= limit,
        measured=f"mean |difference| {mean:.2g} nats over {len(off)} tokens, limit {limit:g} in "
        f"{subject.info.precision}",
    )


CHECKS = (
    Check(
        name="prefix_cache_is_consistent",
        expected="the same log-probs for a prompt that is read for the first time and again",
        usually="a prefix cache that mixes prompts, or other kernels for cached prefixes",
        false_alarm="none at the noise that a precision usually has",
        run=_prefix_cache,
    ),
    Check(
        name="batch_is_independent",
        expected="the same log-probs alone and beside other requests",
        usually="padding that is attended to, or one activation scale for the whole batch",
        false_alarm="none at the noise that a precision usually has",
        run=_batch,
    ),
)
