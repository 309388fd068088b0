"""Causes that no prediction of log-probs tells, but their look or the draws themselves.

A sign is a count that honest sampling almost never gives. Tokens that a sign makes unusable leave
the comparison of predictions.

Legend: S completions, N action tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.diagnosis.case import Case
from trueup.diagnosis.distributions import NUCLEI, TEMPERATURES
from trueup.types import FinishReason

SURE = 6.0
"""Standard errors at which a draw is not what it is said to be: by chance once in 10⁹."""
_FEWEST = 3
"""Tokens or completions that make a sign."""
_CERTAIN = 0.999
"""Probability from which a log-prob of 0 can be rounding."""


@dataclass(frozen=True, kw_only=True)
class Sign:
    """Something that was counted."""

    cause: str
    detail: str
    """What was counted, in words."""
    tokens: Tensor
    """[N] bool: tokens that no longer say anything."""


def signs(case: Case) -> list[Sign]:
    """What is to be seen without comparing predictions, the surest first."""
    return [*_dropped(case)] or [*_appended(case)]


def draw_signs(case: Case, usable: Tensor) -> list[Sign]:
    """What the draws say about how they were drawn, given that log-probs are as they should be.

    Args:
        case: The answers.
        usable: [N] bool, tokens that take part.
    """
    return [*_cut_support(case, usable), *_tempered(case, usable)]


def _dropped(case: Case) -> Iterator[Sign]:
    """Log-probs that are missing, or 0 for tokens that are not certain, within a completion."""
    rollouts, told = case.rollouts, case.told
    zero = (rollouts.said == 0) & (told.logp < math.log(_CERTAIN))
    # Where sampling is cut to one token, 0 is the log-prob of the most probable one.
    told_apart = ~rollouts.known | (zero & (told.ahead > 0) & ~_last(case))
    if int(told_apart.sum()) >= _FEWEST:
        lost = ~rollouts.known | (zero & ~_last(case))
        count = int(lost.sum())
        missing = int((~rollouts.known).sum())
        words = (
            f"{count / len(lost):.1%} of the log-probs are lost ({missing} missing, "
            f"{count - missing} zero)"
        )
        yield Sign(cause="dropped_logprobs", detail=words, tokens=lost | zero)


def _appended(case: Case) -> Iterator[Sign]:
    """Last tokens that stop, of impossible log-prob or beyond the limit, where others are sound."""
    rollouts = case.rollouts
    stopped, over = [], []
    for request, completion in zip(rollouts.requests, rollouts.completions, strict=True):
        ids, limit = completion.token_ids, request.sampling.max_tokens
        ended = completion.finish is FinishReason.STOP and len(ids) > 0
        stopped.append(ended and ids[-1] in request.sampling.stop_ids)
        over.append(len(ids) > limit or (ended and len(ids) == limit))
    ends = _last(case) & torch.tensor(stopped)[rollouts.row]
    at_limit = ends & torch.tensor(over)[rollouts.row]
    certain = ends & (rollouts.said == 0) & (case.told.logp < math.log(_CERTAIN))
    forged = certain | (at_limit & ~rollouts.known)
    count, expected = int(ends.sum()), float(case.told.stop.sum())
    spread = math.sqrt(max(float((case.told.stop * (1 - case.told.stop)).sum()), 1e-9))
    z = (count - expected) / spread
    if int(forged.sum()) >= _FEWEST or (int(at_limit.sum()) >= _FEWEST and z > SURE):
        tokens = forged if forged.any() else at_limit
        words = (
            f"{int(tokens.sum())} stop tokens at the end of completions have a log-prob that they "
            f"cannot have; {count} completions stop where {expected:.0f} are expected"
        )
        yield Sign(cause="appended_eos", detail=words, tokens=tokens)


def _cut_support(case: Case, usable: Tensor) -> Iterator[Sign]:
    """No token from beyond the most probable ones, where many are expected."""
    ahead = case.told.ahead[usable]
    if not len(ahead):
        return
    top = float(ahead.max())
    nucleus = next((p for p in NUCLEI if p >= top), 1.0)
    # A token is beyond with probability about 1 − p, each independently of the others.
    if nucleus < 1 and -len(ahead) * math.log(nucleus) > SURE**2 / 2 + math.log(len(NUCLEI)):
        words = f"none of {len(ahead)} tokens is from beyond top-p {nucleus:g}"
        yield Sign(cause="top_p_unreported", detail=words, tokens=torch.zeros_like(usable))


def _tempered(case: Case, usable: Tensor) -> Iterator[Sign]:
    """Sampled tokens are more, or less, probable than draws from these distributions are.

    Σ (log π(x) + H) has mean 0 and variance Σ Var log π under honest draws, in whatever order.
    """
    told = case.told
    excess = (told.logp + told.entropy)[usable].sum()
    z = float(excess / told.variance[usable].sum().clamp(min=1e-9).sqrt())
    if abs(z) > SURE:
        best = int(told.tempered[:, usable].sum(-1).argmax())
        words = (
            f"sampled tokens are {'more' if z > 0 else 'less'} probable than draws are "
            f"(z = {z:.1f}); they look like draws at {TEMPERATURES[best]:g} times the temperature"
        )
        yield Sign(cause="wrong_temperature", detail=words, tokens=torch.zeros_like(usable))


def _last(case: Case) -> Tensor:
    """[N] bool: last token of its completion."""
    rollouts = case.rollouts
    return rollouts.at == rollouts.lengths[rollouts.row] - 1
