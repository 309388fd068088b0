"""An engine from outside: ask, diagnose, and ask on while the answers are not enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trueup.diagnosis.arithmetic import Arithmetic, floor
from trueup.diagnosis.case import Case
from trueup.diagnosis.diagnose import Diagnosis, diagnose
from trueup.diagnosis.exam import Answers, Examiner, Questions, Release, Version, Wave
from trueup.diagnosis.rollouts import Rollouts, sample
from trueup.diagnosis.scorer import Weights
from trueup.engines.base import Engine
from trueup.types import GenerateRequest

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


async def ask(engine: Engine, requests: Sequence[GenerateRequest]) -> tuple[Rollouts, str]:
    """Completions of an engine whose weights cannot be changed, and its claimed precision.

    Raises:
        EngineFault: It failed.
        DataError: Completions and log-probs do not fit.
    """
    info = await engine.info()
    return await sample(engine, requests), info.precision


def examine_answers(
    model: PreTrainedModel,
    rollouts: Rollouts,
    precision: str,
    *,
    weights: Weights,
    before: Weights | None = None,
) -> tuple[Case, Diagnosis]:
    """Diagnose completions that are there already, all of them said to be of one version.

    Args:
        model: The architecture; its weights are not used.
        rollouts: The completions.
        precision: What the engine claims to compute in.
        weights: Of that version.
        before: Of the version before; None if they are not known, and then no cause that has to do
            with an update can be told.
    """
    count = len(rollouts.completions)
    newest = int(rollouts.version.max()) if len(rollouts.said) else 0
    answers = Answers(
        rollouts=rollouts,
        waves=(Wave.BEFORE,) * count,
        acknowledged=(newest,) * count,
        cached=(0,) * count,
        precision=precision,
    )
    old = None if before is None else Version(version=newest - 1, weights=before)
    return _diagnosed(model, answers, old, Version(version=newest, weights=weights))


def shaken(weights: Weights, *, share: float = 0.01, seed: int = 0) -> dict[str, Tensor]:
    """A version that stands in for the one before, where there is none.

    Args:
        weights: A version.
        share: Root mean square of the change of each tensor, relative to its own.
        seed: Of the changes.
    """
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in weights.items():
        noise = torch.randn(tensor.shape, generator=generator)
        scale = share * tensor.float().square().mean().sqrt()
        found[name] = (tensor.float() + scale * noise).to(tensor.dtype)
    return found


def _diagnosed(
    model: PreTrainedModel, answers: Answers, old: Version | None, new: Version
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
