"""`trueup bisect`: which setting an engine's gap depends on, and which cause explains it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trueup.cli.measure import Dtype, EngineName, Model, Prompts, Quantize, Threads
from trueup.cli.output import AsJson, emit, say, show

if TYPE_CHECKING:
    from trueup.config import EngineConfig
    from trueup.diagnosis.diagnose import Diagnosis
    from trueup.diagnosis.subject import Subject
    from trueup.diagnosis.toggles import Toggles

_SHOWN = 12
"""Rows of the evidence table."""
_DECODED = 8
"""Completions that the toggles decode again."""


def bisect(
    model: Model,
    engine: EngineName = "embedded",
    dtype: Dtype = "bfloat16",
    quantize: Quantize = "none",
    before: Annotated[
        Path | None,
        typer.Option(
            "--before",
            metavar="DIR",
            help="Weights of the version before.  [default: MODEL's, changed by 1 %]",
        ),
    ] = None,
    dump: Annotated[
        Path | None,
        typer.Option(
            "--dump",
            metavar="FILE",
            help="Stored completions (a run, or JSON lines) instead of an engine.",
        ),
    ] = None,
    prompts: Prompts = None,
    toggle: Annotated[
        bool,
        typer.Option("--toggles/--no-toggles", help="Turn settings off one at a time."),
    ] = True,
    threads: Threads = 2,
    as_json: AsJson = False,
) -> None:
    """Name the cause of an engine's gap, or say that it is clean, or not separable."""
    from trueup.diagnosis.subject import Subject, engine_config

    config = engine_config(engine, dtype=dtype, quantize=quantize, slots=48, threads=threads)
    subject = Subject.of(model, prompts=prompts, threads=threads)
    try:
        found, notes = asyncio.run(_diagnose(subject, config, before, dump))
        switched = None
        if toggle and dump is None and config.kind == "embedded":
            switched = asyncio.run(_toggles(subject, config))
        elif toggle:
            notes.append("toggles need the settings of an engine of this process: not turned off")
    finally:
        subject.close()
    if as_json:
        emit(_record(found, switched, notes))
    else:
        _show(found, switched, notes)
    if found.kind != "clean":
        raise typer.Exit(1)


async def _diagnose(
    subject: Subject, config: EngineConfig, before: Path | None, dump: Path | None
) -> tuple[Diagnosis, list[str]]:
    from trueup.diagnosis.exam import Questions
    from trueup.diagnosis.examine import ask, examine, examine_answers, shaken
    from trueup.diagnosis.stored import read

    weights = subject.weights(config)
    given = None if before is None else subject.weights(config, before)
    notes: list[str] = []
    if dump is not None or config.kind == "openai":
        if dump is not None:
            rollouts, precision = read(dump)
        else:
            engine = subject.open(config)
            try:
                rollouts, precision = await ask(engine, subject.requests(48, 32))
            finally:
                await engine.close()
        if given is None:
            notes.append("without --before no cause that has to do with an update can be told")
        _, found = examine_answers(
            subject.model, rollouts, precision, weights=weights, before=given
        )
        return found, notes
    if given is None:
        given = shaken(weights)
        notes.append("the version before is MODEL with every tensor changed by 1 % of its size")
    engine = subject.open(config)
    say("asking around an update")
    try:
        _, found = await examine(
            engine,
            subject.model,
            old=subject.publish(config, given),
            new=subject.publish(config, weights),
            questions=Questions(prompts=subject.prompts, stop_ids=subject.stop_ids),
        )
    finally:
        await engine.close()
    return found, notes


async def _toggles(subject: Subject, config: EngineConfig) -> Toggles:
    from trueup.diagnosis.measure import trainer_logp
    from trueup.diagnosis.rollouts import sample
    from trueup.diagnosis.toggles import toggles

    engine = subject.open(config)
    try:
        await engine.load(subject.publish(config, subject.weights(config)).manifest)
        rollouts = await sample(engine, subject.requests(_DECODED, 32))
    finally:
        await engine.close()
    target = trainer_logp(subject.model, rollouts)
    return await toggles(subject, config, rollouts, target, tell=say)


def _record(found: Diagnosis, switched: Toggles | None, notes: Sequence[str]) -> dict[str, Any]:
    return {
        "verdict": found.kind,
        "cause": found.cause,
        "detail": found.detail,
        "tokens": found.tokens,
        "floor": found.floor,
        "gap": found.gap,
        "left": found.left,
        "signs": [{"cause": sign.cause, "counted": sign.detail} for sign in found.signs],
        "evidence": [asdict(standing) for standing in found.contest.standings],
        "undecided": list(found.undecided),
        "toggles": None if switched is None else asdict(switched),
        "notes": list(notes),
    }


def _show(found: Diagnosis, switched: Toggles | None, notes: Sequence[str]) -> None:
    from trueup.diagnosis.causes import CAUSES

    floor = "of unknown arithmetic" if found.floor is None else f"floor {found.floor:.2g}"
    show(f"{found.tokens} tokens, mean |d| {found.gap:.3g} nats ({floor}), {found.left:.3g} left")
    for sign in found.signs:
        show(f"seen: {sign.detail}")
    show(f"{'hypothesis':58}{'left rms':>10}{'effect':>10}{'slope':>8}{'± s.e.':>9}")
    for row in [s for s in found.contest.standings if s.error or not s.cause][:_SHOWN]:
        name = " ".join(filter(None, (row.cause or "nothing is wrong", row.detail)))
        show(f"{name[:57]:58}{row.rms:10.1e}{row.effect:10.1e}{row.slope:8.2f}{row.error:9.3f}")
    if switched is not None:
        _show_toggles(switched)
    if found.undecided:
        show(f"too weak to be told here: {', '.join(found.undecided)}")
    for note in notes:
        show(f"note: {note}")
    if found.kind == "named":
        cause = CAUSES[found.cause]
        detail = f" ({found.detail})" if found.detail else ""
        show(f"cause: {found.cause}{detail}: {cause.meaning}")
        show(f"remedy: {cause.remedy}")
    else:
        show(found.kind + (f": {found.detail}" if found.detail else ""))


def _show_toggles(found: Toggles) -> None:
    show(f"toggles, {found.tokens} tokens: k3 {found.k3:.2e}, log ESS {found.log_ess:.2e} as it is")
    for row in (*found.one_off, found.all_off):
        show(f"  without {row.name:34} Δk3 {row.delta_k3:+.1e}  Δlog ESS {row.delta_log_ess:+.1e}")
    show(
        f"  {'interaction':42} Δk3 {found.interaction_k3:+.1e}  "
        f"Δlog ESS {found.interaction_log_ess:+.1e}"
    )
