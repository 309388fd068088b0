"""Do tokens come from the distribution that is told, and do log-probs describe it?

Nothing is needed but the engine: first tokens of a few prompts are drawn many times.
"""

from __future__ import annotations

import math
import statistics

from trueup.testing.engine.finding import Check, Finding
from trueup.testing.engine.statistics import lifts, slope, surprise_z, table
from trueup.testing.engine.subject import DRAWS, PROMPTS, Subject
from trueup.testing.protocol import NotExpressible

COLD = 0.6
"""The other temperature that is asked for."""
_TOP_P = 0.9
_LEAST_LIFT = 0.01
"""Nats. A nucleus of 0.9 lifts what it keeps by up to −log 0.9 = 0.105, in flat distributions by
nearly that; the mean over hundreds of tokens has an error of a few thousandths in bfloat16."""
_MOST_CERTAIN = 0.85
"""Probability of the likeliest token up to which a prompt says something about truncation."""
_SPREAD = 8.0
"""Least Σ of squares in nats²: noise of .1 per token then gives the slope an error of .05."""
_CERTAIN_Z = 5.0
_NEAR = 0.5
"""Nats; rounding is below, another token's log-prob is not."""


async def _sampled_as_told(subject: Subject) -> Finding:
    found = {t: surprise_z(await subject.draws(temperature=t)) for t in (1.0, COLD)}
    return Finding(
        ok=all(abs(z) <= _CERTAIN_Z for z in found.values()),
        measured=", ".join(f"z = {z:+.1f} at temperature {t:g}" for t, z in found.items())
        + f" ({PROMPTS * DRAWS} tokens each; above 0: too flat)",
    )


async def _processed_temperature(subject: Subject) -> Finding:
    warm, cold = await subject.draws(), await subject.draws(temperature=COLD)
    found, spread = slope(zip(warm, cold, strict=True))
    if spread < _SPREAD:
        raise NotExpressible(f"log-probs are too equal to compare ({spread:.1f} nats²)")
    expected = 1 / COLD
    return Finding(
        ok=abs(found - expected) < (expected - 1) / 2,
        measured=f"{found:.2f} times as far apart (raw log-probs: 1.00)",
    )


async def _honours_top_p(subject: Subject) -> Finding:
    whole, cut = await subject.draws(), await subject.draws(top_p=_TOP_P)
    found = [
        lift
        for one, other in zip(whole, cut, strict=True)
        if max(table(one).values()) < _MOST_CERTAIN
        for lift in lifts(one, other)
    ]
    if len(found) < DRAWS // 4:
        raise NotExpressible(f"distributions are too peaked to truncate ({len(found)} tokens)")
    mean = statistics.fmean(found)
    return Finding(
        ok=mean > _LEAST_LIFT, measured=f"{mean:+.4f} nats (mean of {len(found)} tokens)"
    )


async def _of_its_token(subject: Subject) -> Finding:
    """The first token of a longer reply has the log-prob that it has as a reply of its own."""
    known = [table(draws) for draws in await subject.draws()]
    prompts = subject.prompts(PROMPTS, 8, "draws")
    asked = [prompt for prompt in prompts for _ in range(8)]
    said = await subject.ask_all(asked, 6)
    off = [
        abs(reply.logps[0] - math.log(probability))
        for index, reply in enumerate(said)
        if (probability := known[index // 8].get(reply.token_ids[0], 0.0)) > 0
    ]
    if len(off) < 8:
        raise NotExpressible(f"only {len(off)} first tokens came twice")
    median = statistics.median(off)
    return Finding(ok=median < _NEAR, measured=f"{median:.3f} nats (median of {len(off)} tokens)")


CHECKS = (
    Check(
        name="sampled_as_told",
        expected=f"tokens as often as their log-probs say, |z| <= {_CERTAIN_Z:g}",
        usually="another temperature or truncation than the one that was asked for (a generation "
        "config), or raw log-probs",
        false_alarm="6e-7 per temperature",
        run=_sampled_as_told,
    ),
    Check(
        name="processed_temperature",
        expected=f"log-probs {1 / COLD:.2f} times as far apart at temperature {COLD:g} as at 1",
        usually="raw log-probs, before the temperature (vLLM: --logprobs-mode processed_logprobs)",
        false_alarm="below 1e-9 with up to .1 nats of noise per token",
        run=_processed_temperature,
    ),
    Check(
        name="honours_top_p",
        expected=f"log-probs raised by more than {_LEAST_LIFT:g} nats where top-p {_TOP_P:g} is "
        "asked for",
        usually="the same truncation is always on, or log-probs are from before it",
        false_alarm="below 1e-6 with up to .1 nats of noise per token",
        run=_honours_top_p,
    ),
    Check(
        name="logprob_of_its_token",
        expected=f"the first token's log-prob not to depend on what follows, to {_NEAR:g} nats",
        usually="log-probs shifted by one against the ids",
        false_alarm="none below .5 nats of noise",
        run=_of_its_token,
    ),
)
