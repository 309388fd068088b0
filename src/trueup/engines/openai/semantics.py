"""Which distribution a server's log-probs are of, found by measuring, not by asking.

*Processed* log-probs are those of the distribution that was sampled from, after temperature and
truncation; *raw* ones are those of the logits as they came. Many servers return raw ones unless
told otherwise, and at temperature 1 without truncation nobody can tell.

Temperature: with l_T the log-probs of a few tokens at one position, differences between tokens are
those of logits over T. The slope of l_T on l_1 through their means is therefore 1/T if processed
and 1 if raw, whatever the model; it is pooled over prompts. Truncation: where a nucleus of
one token is asked for, its processed log-prob is 0, its raw one that of the full distribution.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from trueup.errors import EngineFault
from trueup.types import SamplingParams

_COLD = 0.25
_SLOPE_ERROR = 1.0
_SPREAD = 4.0
"""Smallest Σ (l_1 - mean)² in nats² that decides. Logits that differ by .06 nats (standard
deviation) between two bf16 forwards of the same prompt give the processed slope a standard error of
4 · √2 · .06 / √4 = .17: the chance to miss 4 ± 1, and to refuse a good server, is 4e-9; the raw one
is four times as sharp."""
_PROMPTS = 16
_CERTAIN = 1e-3
_NUCLEUS = 1e-6

HOW_TO = (
    "processed log-probs (of the distribution sampled from; vLLM: --logprobs-mode "
    "processed_logprobs)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobMode:
    """What a server's log-probs take into account."""

    temperature: bool
    top_p: bool
    top_k: bool

    def demand(self, sampling: SamplingParams) -> None:
        """Refuse to sample what the log-probs would not describe.

        Raises:
            EngineFault: Raw log-probs where the sampling parameters make a difference.
        """
        for changes, processed, value in (
            (sampling.temperature != 1, self.temperature, f"temperature {sampling.temperature:g}"),
            (sampling.top_p < 1, self.top_p, f"top_p {sampling.top_p:g}"),
            (sampling.top_k > 0, self.top_k, f"top_k {sampling.top_k}"),
        ):
            if changes and not processed:
                raise EngineFault(
                    field="engine server", rule=HOW_TO, value=f"raw log-probs at {value}"
                )


Observe = Callable[[list[int], SamplingParams], Awaitable[tuple[str, Mapping[str, float]]]]
"""Sample one token: its name, and the log-probs by name of it and of the alternatives listed."""


async def measure(observe: Observe, *, vocab_size: int) -> LogprobMode:
    """Find the mode of a server that lists alternatives, with a few requests for one token.

    Args:
        observe: Asks the server.
        vocab_size: Prompts are random ids below it.

    Raises:
        EngineFault: The log-probs follow neither rule, or nothing told them apart.
    """
    rng = random.Random(0)
    spread = product = 0.0
    for _ in range(_PROMPTS):
        prompt = [rng.randrange(vocab_size) for _ in range(8)]
        _, plain = await observe(prompt, _one())
        _, cold = await observe(prompt, _one(temperature=_COLD))
        common = sorted(plain.keys() & cold.keys())
        x = _centred([plain[token] for token in common])
        y = _centred([cold[token] for token in common])
        spread += sum(value * value for value in x)
        product += sum(a * b for a, b in zip(x, y, strict=True))
        if spread >= _SPREAD:
            return LogprobMode(
                temperature=_processed(product / spread),
                top_p=await _certain(observe, prompt, plain, _one(top_p=_NUCLEUS)),
                top_k=await _certain(observe, prompt, plain, _one(top_k=1)),
            )
    raise EngineFault(
        field="log-prob mode of the engine server",
        rule=f"measurable: alternatives listed, {_SPREAD:g} nats² apart over {_PROMPTS} prompts",
        value=f"{spread:.2g} nats²",
    )


def _centred(values: list[float]) -> list[float]:
    mean = sum(values) / max(len(values), 1)
    return [value - mean for value in values]


def _one(*, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> SamplingParams:
    return SamplingParams(
        max_tokens=1, stop_ids=(), temperature=temperature, top_p=top_p, top_k=top_k
    )


def _processed(slope: float) -> bool:
    expected = 1 / _COLD
    if abs(slope - expected) < _SLOPE_ERROR:
        return True
    if abs(slope - 1) < _SLOPE_ERROR:
        return False
    raise EngineFault(
        field="log-probs of the engine server",
        rule=f"{expected:g} times as far apart at temperature {_COLD:g} as at 1 (processed), or "
        "as far (raw)",
        value=f"{slope:.2f} times",
    )


async def _certain(
    observe: Observe, prompt: list[int], plain: Mapping[str, float], sampling: SamplingParams
) -> bool:
    """Whether the only token of a truncated support has log-prob 0, though others were possible."""
    token, logps = await observe(prompt, sampling)
    others = sum(math.exp(logp) for other, logp in plain.items() if other != token)
    return others > 10 * _CERTAIN and abs(logps[token]) < _CERTAIN
