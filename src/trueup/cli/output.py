"""What the commands say and where: results on stdout, everything else on stderr.

Text is shown as text: no markup is interpreted, and control characters are made visible.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trueup.errors import TrueupError
from trueup.reports.markup import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

AsJson = Annotated[
    bool, typer.Option("--json", help="Print the result as one JSON object, the last line.")
]
"""The option that every command has."""

OK, FAILED, UNKNOWN = "✓", "✗", "–"


class Interrupted(TrueupError):
    """The user pressed Ctrl-C before there was anything to keep."""

    kind = "interrupted"
    exit_code = 130


def say(text: str) -> None:
    """Tell the user something that is not the result."""
    typer.echo(_plain(text), err=True)


def show(text: str) -> None:
    """Print a part of the result."""
    typer.echo(_plain(text))


def draw(renderable: RenderableType) -> None:
    """Print a part of the result that rich lays out."""
    from rich.console import Console

    Console().print(renderable)


def emit(record: Mapping[str, Any]) -> None:
    """Print the result as JSON on one line."""
    typer.echo(json.dumps(record, default=str))


def fail(error: TrueupError, *, as_json: bool) -> int:
    """Report an error, with its notes; returns the exit code."""
    if as_json:
        emit({"error": error.as_dict()})
    typer.secho("error:", fg="red", bold=True, nl=False, err=True)
    typer.echo(f" {_plain(error.message)}", err=True)
    for note in getattr(error, "__notes__", ()):
        say(note)
    return error.exit_code


def _plain(text: str) -> str:
    return "\n".join(visible(line) for line in text.split("\n"))
