"""Runs a case against a correction and says whether its outcome is the right one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trueup.testing.cases import Case, Step, Want
from trueup.testing.protocol import (
    Arrays,
    CorrectionFunction,
    Merging,
    NotExpressible,
    Outcome,
)

Status = Literal["pass", "fail", "not expressible"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a case came to."""

    status: Status
    """`fail` if anything is wrong, else `not expressible` if anything could not be asked."""
    reason: str
    """First what is wrong, or what could not be asked; empty for a pass."""


_BROKEN = (NameError, AttributeError, ImportError, NotImplementedError)
"""Errors that are no refusal of the input."""


class _Wrong(Exception):
    """One thing that is not as it should be."""


def judge(case: Case, correction: CorrectionFunction) -> Judgement:
    """Run all steps of a case."""
    unasked: list[str] = []
    outcomes: list[Outcome] = []
    try:
        for step in case.steps:
            outcome = _call(step, correction, unasked)
            if outcome is not None:
                unasked += _compare(step, outcome, outcomes)
                outcomes.append(outcome)
        if case.merged:
            unasked += _compare_merged(case.merged, outcomes, correction)
    except _Wrong as wrong:
        return Judgement(status="fail", reason=str(wrong))
    if unasked:
        return Judgement(status="not expressible", reason="; ".join(dict.fromkeys(unasked)))
    return Judgement(status="pass", reason="")


def _call(step: Step, correction: CorrectionFunction, unasked: list[str]) -> Outcome | None:
    """The outcome of one step; None if there is none to look at."""
    want = step.want
    try:
        outcome = correction(step.arrays(), step.method, step.run)
    except NotExpressible as missing:
        unasked.append(str(missing))
        return None
    except Exception as error:  # whatever a foreign implementation raises is its answer
        if (want.refused or want.corrected) and not isinstance(error, _BROKEN):
            return None
        raise _Wrong(f"raised {type(error).__name__}: {error}") from error
    if want.refused:
        raise _Wrong("accepted what must be refused")
    return outcome


def _compare(step: Step, outcome: Outcome, earlier: Sequence[Outcome]) -> list[str]:
    """What could not be asked of an outcome.

    Raises:
        _Wrong: Something is not as wanted.
    """
    want, arrays = step.want, step.arrays()
    unasked = list(_check_finite(outcome))
    unasked += _check_weight(want, arrays, outcome)
    unasked += _check_keep(want, arrays, outcome)
    unasked += _check_advantage(want, arrays, outcome)
    if want.denominator is not None:
        if outcome.denominator is None:
            unasked.append("no denominator")
        else:
            _near("denominator", outcome.denominator, want.denominator, want.tolerance)
    if want.alarm is not None:
        if outcome.alarms is None:
            unasked.append("no alarms")
        elif want.alarm not in outcome.alarms:
            raise _Wrong(f"no alarm {want.alarm}")
    expected: Mapping[str, float] = want.metrics
    if want.as_step is not None:
        skip = {"rows_without_action"}  # what counts the difference
        expected = {k: v for k, v in earlier[want.as_step].metrics.items() if k not in skip}
        if not expected:
            unasked.append("no metrics")
    return unasked + list(_check_metrics(expected, outcome.metrics, want.tolerance))


def _check_finite(outcome: Outcome) -> Iterator[str]:
    for name in ("weight", "advantage"):
        value: Tensor | None = getattr(outcome, name)
        if value is not None and not bool(torch.isfinite(value).all()):
            raise _Wrong(f"{name} is not finite")
    for name, figure in outcome.metrics.items():
        if not math.isfinite(figure):
            raise _Wrong(f"{name} is {figure}")
    yield from ()


def _check_weight(want: Want, arrays: Arrays, outcome: Outcome) -> Iterator[str]:
    if want.weight is None and not want.corrected:
        return
    if outcome.weight is None:
        yield "no weights"
        return
    weight = outcome.weight.expand(arrays.action.shape)[arrays.action].tolist()
    if want.corrected and all(w == 1 for w in weight):
        raise _Wrong("every weight is 1")
    expected = [x for row in want.weight or () for x in row]
    for found, right in zip(weight, expected, strict=False):
        if right == right:
            _near("weight", found, right, want.tolerance)


def _check_keep(want: Want, arrays: Arrays, outcome: Outcome) -> Iterator[str]:
    if want.keep is None:
        return
    if outcome.keep is None:
        yield "no keep flags"
        return
    for i, right in enumerate(want.keep):
        found = outcome.keep[i][arrays.action[i]].tolist()
        if right is not None and found != list(right):
            raise _Wrong(f"row {i} keeps {found}, not {list(right)}")


def _check_advantage(want: Want, arrays: Arrays, outcome: Outcome) -> Iterator[str]:
    if want.advantage is None:
        return
    if outcome.advantage is None:
        yield "no advantages"
        return
    taken = arrays.action if outcome.keep is None else arrays.action & outcome.keep
    for i, right in enumerate(want.advantage):
        for found in outcome.advantage[i][taken[i]].tolist() if right == right else ():
            _near(f"advantage of row {i}", found, right, want.tolerance)


def _check_metrics(
    expected: Mapping[str, float], found: Mapping[str, float], tolerance: float
) -> Iterator[str]:
    for name, right in expected.items():
        if name not in found:
            yield f"no metric {name}"
        else:
            _near(name, found[name], right, tolerance)


def _compare_merged(
    expected: Mapping[str, float], outcomes: Sequence[Outcome], correction: CorrectionFunction
) -> Iterator[str]:
    if not isinstance(correction, Merging):
        yield "no merging of metrics"
        return
    yield from _check_metrics(expected, correction.merge(outcomes), 1e-5)


def _near(name: str, found: float, right: float, tolerance: float) -> None:
    if not math.isclose(found, right, rel_tol=tolerance, abs_tol=tolerance):
        raise _Wrong(f"{name} is {found:.6g}, not {right:.6g}")
