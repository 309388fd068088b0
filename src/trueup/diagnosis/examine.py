"""An engine from outside: ask, diagnose, and ask on while the answers are not enough."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueup.diagnosis.arithmetic import Arithmetic, floor
from trueup.diagnosis.case import Case
from trueup.diagnosis.diagnose import Diagnosis, diagnose
from trueup.diagnosis.exam import Answers, Examiner, Questions, Release
from trueup.engines.base import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedModel


async def examine(
    engine: Engine,
    model: PreTrainedModel,
    *,
    old: Release,
    new: Release,
    questions: Questions,
) -> tuple[Case, Diagnosis]:
    """Diagnose an engine around one update.

    Args:
        engine: Loads both versions on the way; what it serves afterwards is version v.
        model: The architecture; its weights are not used.
        old: Version u, before the update.
        new: Version v.
        questions: How much to ask.

    Raises:
        DataError: There is no prompt, or completions and log-probs do not fit.
        EngineFault: The engine failed.
        TransportFault: It refused a version.
    """
    examiner = Examiner(engine, old, new, questions)
    answers = await examiner.first()
    case, found = _diagnosed(model, answers, old, new)
    for _ in range(questions.rounds - 1):
        if not _open(found):
            break
        answers = answers.joined(await examiner.more())
        case, found = _diagnosed(model, answers, old, new)
    return case, found


def _diagnosed(
    model: PreTrainedModel, answers: Answers, old: Release | None, new: Release
) -> tuple[Case, Diagnosis]:
    arithmetic = Arithmetic.of(answers.precision)
    scorer = arithmetic.scorer(model)
    plain = scorer if arithmetic.scheme is None else arithmetic.scorer(model, grid=False)
    case = Case(answers=answers, old=old, new=new, scorer=scorer, plain=plain)
    return case, diagnose(case, floor=floor(model, case))


def _open(found: Diagnosis) -> bool:
    """Whether further answers may decide."""
    if found.kind == "named":
        return False
    rivals = bool(found.contest.rivals)
    return rivals or any(standing.suspected for standing in found.contest.standings)
