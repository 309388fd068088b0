"""`trueup config` and `trueup recipes`: what can be set, what it means, what a recipe sets."""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from trueup import config as configuration
from trueup.cli.output import AsJson, emit, show
from trueup.cli.selection import Words, select
from trueup.config import Config
from trueup.recipes import table

app = typer.Typer(help="Show, explain and describe the configuration.", rich_markup_mode=None)

Recipe = Annotated[
    str | None,
    typer.Argument(metavar="RECIPE", help=f"See `trueup recipes`; {table.DEFAULT} if not given."),
]
Changes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY.PATH=VALUE", help="Changes to the configuration; see `trueup config explain`."
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="A TOML file instead of a recipe."),
]

_PRESET = "correction.preset"
_PARAMS = "correction.params"
_FILTERS = "correction.filters"


def recipes(as_json: AsJson = False) -> None:
    """List the recipes."""
    found = {name: _first_comment(table.text(name)) for name in table.names()}
    if as_json:
        emit({"default": table.DEFAULT, "recipes": found})
        return
    for name, meaning in found.items():
        show(f"{name:12} {meaning}")


@app.command("show")
def show_config(
    recipe: Recipe = None,
    changes: Changes = None,
    file: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Print a recipe with its changes as a complete TOML file."""
    config = select(Words.of(recipe, changes), file).config
    if as_json:
        emit(config.model_dump(mode="json"))
    else:
        show(configuration.as_toml(config).rstrip())


@app.command()
def schema(as_json: AsJson = False) -> None:
    """Print the JSON schema of the configuration."""
    found = Config.model_json_schema()
    if as_json:
        emit(found)
    else:
        show(json.dumps(found, indent=2, ensure_ascii=False))


@app.command()
def explain(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY[=VALUE]",
            help="A section, a key, or a key with a value, e.g. correction.preset=tis.",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Say what a key means; for a value of correction.preset also its formula and price."""
    name, equals, value = key.partition("=")
    if equals:
        configuration.load("", [key])
    known = _keys(name)
    method = _method(name, value)
    if as_json:
        keys = {
            full: {"type": kind, "default": default, "meaning": meaning}
            for full, (kind, meaning, default) in known.items()
        }
        emit({"keys": keys, "explanation": method})
        return
    for full, (kind, meaning, default) in known.items():
        show(f"{full} = {plain(default)}  ({kind})")
        if meaning:
            show(f"    {' '.join(meaning.split())}")
    if method:
        show(f"\n{method}")


def changed(config: Config) -> dict[str, tuple[Any, Any]]:
    """Keys that differ from the defaults: name -> (value, default)."""
    values = {
        name: (attrgetter(name)(config), default)
        for name, (_, _, default) in configuration.fields().items()
    }
    return {name: pair for name, pair in values.items() if pair[0] != pair[1]}


def plain(value: Any) -> str:
    """A value as the user would write it."""
    return json.dumps(value, ensure_ascii=False)


def _keys(name: str) -> dict[str, tuple[str, str, Any]]:
    """The keys of a section, or one key; all for an empty name.

    Raises:
        ConfigError: There is no such section or key; names the nearest.
    """
    every = configuration.fields()
    if not name:
        return every
    parents = (table for table in (_PARAMS, _FILTERS) if name.startswith(f"{table}."))
    key = next(parents, name)
    found = {full: entry for full, entry in every.items() if f"{full}.".startswith(f"{key}.")}
    if not found:
        configuration.load("", [f"{name}=0"])
    return found


def _method(name: str, value: str) -> str:
    """What the correction's own table says about a preset or its constants."""
    if not name.startswith("correction."):
        return ""
    from trueup.corrections.table import FILTERS, PRESETS
    from trueup.corrections.table import explain as explain_preset

    if name == _PRESET and value:
        return explain_preset(value.strip("\"' "))
    if name == _PRESET:
        return "\n".join(f"{p.name}: {p.formula}. {p.meaning}" for p in PRESETS.values())
    if name.startswith(f"{_FILTERS}."):
        return explain_preset(name.removeprefix(f"{_FILTERS}.").partition(".")[0])
    if name == _FILTERS:
        return "\n".join(f"{p.name}: {p.formula}" for p in FILTERS.values())
    if name.startswith(_PARAMS):
        return "\n".join(
            f"{p.name}: {key} = {constant.default:g} ({constant.meaning})"
            for p in PRESETS.values()
            for key, constant in p.constants.items()
            if name in (_PARAMS, f"{_PARAMS}.{key}")
        )
    return ""


def _first_comment(toml: str) -> str:
    return toml.partition("\n")[0].removeprefix("#").strip()
