"""From answers to a named cause, "clean", or "not separable", with the evidence.

    1  signs: what can be counted (lost log-probs, forged ends); such tokens leave the rest
    2  the contest of all predictions
    3  what the winner leaves over, against the floor of the claimed arithmetic
    4  if nothing is wrong with the log-probs, whether the draws are what they are said to be

The floor is measured, not assumed: the trainer's own forward of the same tokens in the claimed
arithmetic, against the same forward in a wider one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trueup.diagnosis.case import Case
from trueup.diagnosis.causes import predictions
from trueup.diagnosis.contest import Contest, Standing, contest
from trueup.diagnosis.signs import Sign, draw_signs, signs

LEAST_FLOOR = 1e-5
"""Mean |d| in nats that float32 arithmetic explains whatever the measured floor is."""
ABOVE_FLOOR = 4.0
"""Times the floor at which a gap is more than arithmetic."""
_DULL = 0.25
"""Standard error of a slope above which a cause can be neither named nor excluded."""

Kind = Literal["clean", "named", "not separable"]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What is wrong with an engine, if anything."""

    kind: Kind
    cause: str
    """Name in `CAUSES`; empty unless one is named."""
    detail: str
    """Which of its kind, or why none is named."""
    tokens: int
    """Tokens that were compared."""
    floor: float | None
    """Mean |d| in nats that the claimed arithmetic explains; None if it is not known."""
    gap: float
    """Mean |d| in nats to what the labels imply."""
    left: float
    """Mean |d| in nats to what the named cause implies."""
    signs: tuple[Sign, ...]
    contest: Contest
    undecided: tuple[str, ...]
    """Causes, some or all kinds of which change the log-probs by too little to be told from the
    noise, with their number."""


def diagnose(case: Case, *, floor: float | None) -> Diagnosis:
    """Name the cause that explains the answers.

    Args:
        case: Answers and weights.
        floor: Mean |d| in nats that the claimed arithmetic explains; None if unknown, and then
            no gap is called unexplained.
    """
    found = signs(case)
    usable = case.usable.clone()
    for sign in found:
        usable &= ~sign.tokens
    candidates = predictions(case, usable)
    result = contest(case.rollouts.said, candidates, clusters=case.rollouts.clusters, among=usable)
    winner, chosen = result.winner, candidates[result.index]
    residual = (case.rollouts.said - chosen.logp)[usable].abs()
    gap = (case.rollouts.said - candidates[0].logp)[usable].abs()
    left = float(residual.mean()) if len(residual) else 0.0
    explained = floor is None or left <= max(ABOVE_FLOOR * floor, LEAST_FLOOR)
    if explained and not winner.cause and not found:
        found = draw_signs(case, usable)
    kind, cause, detail = _verdict(result, found, explained=explained, left=left, floor=floor)
    return Diagnosis(
        kind=kind,
        cause=cause,
        detail=detail,
        tokens=int(usable.sum()),
        floor=floor,
        gap=float(gap.mean()) if len(gap) else 0.0,
        left=left,
        signs=tuple(found),
        contest=result,
        undecided=_undecided(result.standings),
    )


def _verdict(
    result: Contest, found: Sequence[Sign], *, explained: bool, left: float, floor: float | None
) -> tuple[Kind, str, str]:
    winner = result.winner
    if result.rivals:
        causes = ", ".join((winner.cause, *result.rivals))
        return "not separable", "", f"explained about as well by {causes}"
    if not explained:
        words = f"mean |d| of {left:.3g} nats is more than the floor of {floor:.3g}, and "
        words += f"{winner.cause} explains a part of it" if winner.cause else "no cause explains it"
        return "not separable", "", words
    if winner.cause:
        if found:
            causes = ", ".join((winner.cause, *(sign.cause for sign in found)))
            return "not separable", "", f"several at once: {causes}"
        return "named", winner.cause, winner.detail
    if found:
        return "named", found[0].cause, found[0].detail
    return "clean", "", ""


def _undecided(standings: Sequence[Standing]) -> tuple[str, ...]:
    """Causes with kinds whose slope is too uncertain to name or to exclude them."""
    tested = Counter(s.cause for s in standings if s.cause and s.error)
    dull = Counter(s.cause for s in standings if s.cause and s.error > _DULL and not s.excluded)
    return tuple(f"{cause} ({n} of {tested[cause]})" for cause, n in sorted(dull.items()))
