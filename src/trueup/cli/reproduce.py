"""`trueup reproduce`: an experiment again, beside the figures of its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trueup.cli.output import FAILED, OK, AsJson, emit, say, show
from trueup.cli.runs import shown
from trueup.experiments.table import EXPERIMENTS, Experiment, find

if TYPE_CHECKING:
    from trueup.experiments.base import Outcome

RESULT, FIGURE = "result.json", "figure.svg"


def reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The experiment; lists all if not given.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Fewer repeats of all that the source does not print."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help=f"Write {RESULT} and {FIGURE} there."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Repeat an experiment and print its table beside its source's; fails where digits differ."""
    if name is None:
        _list(as_json=as_json)
        return
    experiment = find(name)
    finish(experiment, experiment.load()(quick, say), quick=quick, out=out, as_json=as_json)


def finish(
    experiment: Experiment, outcome: Outcome, *, quick: bool, out: Path | None, as_json: bool
) -> None:
    """Write and print what an experiment found; ends with exit code 1 if digits differ."""
    if out is not None:
        _write(experiment, outcome, quick=quick, out=out)
    if as_json:
        emit(
            {
                "name": experiment.name,
                "ok": not outcome.differences,
                "differences": list(outcome.differences),
                "quick": quick,
                "result": outcome.result,
            }
        )
    else:
        show(experiment.question)
        for table in outcome.tables:
            show(f"\n{table.markdown()}")
        show("")
        for line in outcome.differences:
            show(f"{FAILED} {line}")
        if not outcome.differences:
            show(f"{OK} every printed digit of the source is reproduced")
    if outcome.differences:
        raise typer.Exit(1)


def _write(experiment: Experiment, outcome: Outcome, *, quick: bool, out: Path) -> None:
    from trueup.reports.standalone import standalone

    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"quick": quick, **outcome.result}, indent=1, allow_nan=False)
    (out / RESULT).write_text(f"{text}\n", encoding="utf-8")
    drawing = standalone(outcome.figures, title=experiment.question)
    (out / FIGURE).write_text(f"{drawing}\n", encoding="utf-8")
    say(f"wrote {RESULT} and {FIGURE} in {shown(out)}")


def _list(*, as_json: bool) -> None:
    if as_json:
        found = {e.name: {"question": e.question, "aliases": e.aliases} for e in EXPERIMENTS}
        emit({"experiments": found})
        return
    for experiment in EXPERIMENTS:
        names = ", ".join((experiment.name, *experiment.aliases))
        show(f"{names}  {experiment.question}")
