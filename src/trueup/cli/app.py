"""The commands, and the one place where an error becomes a message and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from trueup import __version__
from trueup.cli import bisect, doctor, inspect, measure, reproduce, settings, training, whatif
from trueup.cli.output import fail, show
from trueup.errors import Fault, TrueupError, UsageError

_EXTRA = frozenset({"torch", "transformers", "safetensors", "tokenizers", "numpy"})
"""Packages of the extra `torch`."""

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=training.EXAMPLES)(training.train)
app.command()(inspect.report)
app.command()(inspect.audit)
app.command()(whatif.whatif)
app.command()(measure.measure)
app.command()(bisect.bisect)
app.command()(reproduce.reproduce)
app.command()(doctor.doctor)
app.command()(settings.recipes)
app.add_typer(settings.app, name="config")


@app.callback(invoke_without_command=True)
def trueup(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Asynchronous RL of language-model agents in which no token's origin is a guess.

    To begin: trueup doctor, then trueup train.
    """
    if version:
        show(f"trueup {__version__}")
    elif context.invoked_subcommand is None:
        show(context.get_help())
    else:
        return
    raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Words after `trueup`; those of the process when None.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words
    try:
        return app(words, prog_name="trueup", standalone_mode=False, obj=words) or 0
    except TrueupError as error:
        return fail(error, as_json=as_json)
    except typer.TyperException as error:
        return fail(_wrong_usage(error), as_json=as_json)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        return fail(_not_installed(str(error.name)), as_json=as_json)
    except OSError as error:
        return fail(Fault(str(error), field=str(error.filename or "")), as_json=as_json)


def _wrong_usage(error: typer.TyperException) -> UsageError:
    found = UsageError(error.format_message(), field="command line", rule="a known usage")
    context = getattr(error, "ctx", None)
    if context is not None:
        found.add_note(f"try: {context.command_path} --help")
    return found


def _not_installed(package: str) -> UsageError:
    return UsageError(
        f"this command needs the package {package!r}; install it with pip install 'trueup[torch]'",
        field=package,
        rule="installed",
    )
