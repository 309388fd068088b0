"""`trueup whatif`: what other corrections would have done with recorded tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trueup.cli.output import AsJson, draw, emit, show
from trueup.cli.runs import shown
from trueup.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from trueup.corrections.advice import Facts, Recommendation
    from trueup.corrections.whatif import Row
    from trueup.integrations.dumps.dump import Dump

Source = Annotated[
    Path,
    typer.Argument(metavar="PATH", help="Directory of a run, or a file or folder of a dump."),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="NAME",
        help="run, verl, trl, prime-rl or arrays.  [default: told from what is there]",
    ),
]
Names = Annotated[
    str | None,
    typer.Option("--presets", metavar="NAMES", help="Presets with commas between.  [default: all]"),
]
Steps = Annotated[
    str | None,
    typer.Option(
        "--steps",
        metavar="A:B",
        help="Step batches from A up to, not including, B.  [default: all]",
    ),
]

_FOREVER = 2**63 - 1


def whatif(
    path: Source,
    kind: Format = None,
    presets: Names = None,
    steps: Steps = None,
    as_json: AsJson = False,
) -> None:
    """Say what other corrections would have done with the tokens of a run or of a dump."""
    within = None if steps is None else _range(steps)
    from trueup.corrections.advice import facts, recommend
    from trueup.corrections.table import PRESETS, find
    from trueup.corrections.whatif import whatif as compare
    from trueup.integrations.dumps.formats import read

    names = [word.strip() for word in presets.split(",")] if presets else list(PRESETS)
    for name in names:
        find(name)
    dump = read(path, kind=kind, steps=within)
    comparison = compare(dump.batches, presets=names, replay=dump.replay)
    found = facts(dump.batches)
    advice = recommend(found, comparison.rows)
    missing = (
        *dump.missing,
        "no hidden states: the angle to the gradient of full ratios cannot be told",
    )
    if as_json:
        emit(
            {
                "path": str(shown(path)),
                "format": dump.source,
                "steps": list(dump.steps),
                "facts": asdict(found),
                "presets": [asdict(row) for row in comparison.rows],
                "refused": dict(comparison.refused),
                "recommendation": asdict(advice),
                "missing": list(missing),
                "notes": list(dump.notes),
            }
        )
        return
    show(_head(path, dump, found))
    draw(_weights(comparison.rows))
    draw(_kept(comparison.rows))
    _conclude(advice, comparison.refused, missing, dump.notes)


def _range(text: str) -> range:
    first, colon, last = text.partition(":")
    try:
        start, stop = int(first or 0), int(last) if last else _FOREVER
    except ValueError:
        colon = ""
    if not colon or not 0 <= start < stop:
        raise UsageError(
            field="--steps", rule="A:B with 0 <= A < B, either may be empty", value=text
        )
    return range(start, stop)


def _head(path: Path, dump: Dump, found: Facts) -> str:
    floor = "" if found.floor is None else f", {found.floor:.3g} of it the engine's floor"
    lag = f", lag at most {found.max_lag}" if found.max_lag else ""
    return (
        f"{shown(path)} ({dump.source}): {found.tokens} action tokens, {found.episodes} episodes, "
        f"{found.steps} step batches{lag}\n"
        f"gap: mean |d| {found.abs_mean:.3g} nats{floor}; median {found.abs_median:.3g}, "
        f"max {found.abs_max:.3g}; raw ESS {found.ess_tokens:.2f} of the tokens, "
        f"{found.ess_episodes:.2f} of the episodes"
    )


def _weights(rows: Sequence[Row]) -> Table:
    table = _table("weights", "w mean", "w max", "over cap", "ESS tok", "ESS ep", "left", "second")
    for row in rows:
        table.add_row(
            row.preset,
            f"{row.weight_mean:.3f}",
            f"{row.weight_max:.4g}",
            _share(row.over_cap),
            _share(row.ess_tokens),
            _share(row.ess_episodes),
            _share(row.left),
            "–" if row.second is None else f"{row.second:.4g}",
        )
    return table


def _kept(rows: Sequence[Row]) -> Table:
    lengths = ("short", "·", "·", "long")
    table = _table("kept", "tokens", "epis.", *lengths, "R > 0", "R <= 0", "Z all", "Z kept")
    for row in rows:
        kept = row.kept
        shares = (kept.tokens, kept.episodes, *kept.by_length, kept.rewarded, kept.unrewarded)
        table.add_row(
            row.preset,
            *map(_share, shares),
            f"{row.denominator_all:.0f}",
            f"{row.denominator_kept:.0f}",
        )
    return table


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("preset", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _conclude(
    advice: Recommendation,
    refused: Mapping[str, str],
    missing: tuple[str, ...],
    notes: tuple[str, ...],
) -> None:
    for fix in advice.fixes:
        show(f"fix first: {fix}")
    show(f"recommended: {advice.preset}. {advice.reason}")
    for caution in advice.cautions:
        show(f"caution: {caution}")
    for preset, why in refused.items():
        show(f"refused: {preset}: {why}")
    for line in missing:
        show(f"missing: {line}")
    for note in notes:
        show(f"note: {note}")


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
