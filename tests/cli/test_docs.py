import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from trueup.cli.app import app

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """All commands that do something, with what the user types for them."""
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from commands(inner, f"{path} {name}")
    else:
        yield path, command


def test_the_page_names_every_command_and_every_option():
    found = dict(commands(typer.main.get_command(app), "trueup"))
    assert {"trueup train", "trueup config show"} <= found.keys()
    for path, command in found.items():
        assert f"`{path}" in PAGE
        for parameter in command.params:
            for option in (o for o in parameter.opts if o.startswith("--")):
                assert f"`{option}" in PAGE


def test_the_page_names_no_command_that_is_not_there():
    typed = {line.split("`")[1] for line in PAGE.splitlines() if line.startswith("| `trueup ")}
    found = dict(commands(typer.main.get_command(app), "trueup"))
    # After the command come placeholders: RUN, [RECIPE], ...
    assert {re.split(r" \[| [A-Z]", usage)[0] for usage in typed} == found.keys()
