"""`trueup train`: start a run or go on with one, show it, and say what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trueup.cli.output import AsJson, Interrupted, draw, emit, say, show
from trueup.cli.plan import Plan, new, resumed
from trueup.cli.rehearsal import rehearse
from trueup.cli.runs import shown
from trueup.cli.selection import Words
from trueup.cli.settings import Changes, ConfigFile, Recipe
from trueup.config import cache_dir
from trueup.errors import DataError, Fault, TrueupError

if TYPE_CHECKING:
    from trueup.training.run import Outcome

EXAMPLES = """\b
Examples:
  trueup train
  trueup train tiny-sync seed=1 --run runs/sync
  trueup train --resume train.steps=60"""

_EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}

RunOption = Annotated[
    Path | None,
    typer.Option(
        "--run", metavar="DIR", help="Directory of the run.  [default: runs/RECIPE-N, N the next]"
    ),
]
ResumeFlag = Annotated[
    bool,
    typer.Option(
        "--resume", help="Go on from the newest checkpoint of --run, or of the newest run in runs/."
    ),
]
DryRunFlag = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, start nothing, write nothing.")
]


def train(
    context: typer.Context,
    recipe: Recipe = None,
    changes: Changes = None,
    file: ConfigFile = None,
    path: RunOption = None,
    resume: ResumeFlag = False,
    dry_run: DryRunFlag = False,
    as_json: AsJson = False,
) -> None:
    """Train a recipe, or go on with a run."""
    plan = (resumed if resume else new)(Words.of(recipe, changes), file, path)
    if dry_run:
        rehearse(plan, as_json=as_json)
        return
    try:
        _announce(plan)
        outcome = _control(plan, ("trueup", *context.obj))
    except KeyboardInterrupt:
        raise Interrupted("interrupted before training began") from None
    _conclude(plan, outcome, as_json=as_json)


def _announce(plan: Plan) -> None:
    say(f"{plan.source} {'goes on' if plan.resumes else 'runs'} in {plan.directory}: {plan.size}")
    if plan.builds_base:
        say(f"first the base policy is built: once, about 30 s, kept in {cache_dir()}")


def _control(plan: Plan, command: Sequence[str]) -> Outcome:
    from trueup.reports.live import LiveView
    from trueup.training import run
    from trueup.training.progress import Progress

    path = plan.run.path
    try:
        with LiveView(plan.config.train.steps) as view:
            view.update(Progress(step=0, version=0, phase="preparing"))
            if plan.resumes:
                return run.go_on(path, plan.overrides, on_step=view.update)
            return run.train(
                plan.config, path.parent, path.name, on_step=view.update, command=command
            )
    except (Fault, DataError) as error:
        _explain(error, plan)
        raise


def _conclude(plan: Plan, outcome: Outcome, *, as_json: bool) -> None:
    from trueup.reports.html import write_report
    from trueup.reports.live import final_table
    from trueup.reports.summary import summarise

    summary = summarise(plan.run.path)
    page = write_report(plan.run.path)
    if as_json:
        emit(summary.as_json())
    else:
        draw(final_table(summary))
        show(f"report: {shown(page)}")
        show(f"next:   trueup audit {plan.directory}")
        show(f"        trueup report {plan.directory} --open")
    if outcome.status == "interrupted":
        say(f"interrupted by {outcome.signal} and kept a checkpoint; to go on:")
        say(f"        trueup train --resume --run {plan.directory}")
        raise typer.Exit(_EXIT_CODES[outcome.signal])


def _explain(error: TrueupError, plan: Plan) -> None:
    """Say where to look, if the run had begun; its report is a help and no duty."""
    from trueup.reports.html import write_report

    if not plan.run.logs.is_dir():
        return
    error.add_note(f"logs:   {shown(plan.run.logs)}")
    with suppress(TrueupError, OSError):
        error.add_note(f"report: {shown(write_report(plan.run.path))}")
