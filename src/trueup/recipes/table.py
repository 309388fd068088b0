"""The recipes: a run is a named, complete configuration.

To add one: a file `NAME.toml` beside this one, opening with a comment that says what to expect of
it. Its name is found by itself, and tests/recipes/test_recipes.py checks it.
"""

from __future__ import annotations

import difflib
from importlib.resources import files

from trueup.errors import ConfigError

DEFAULT = "tiny-async"
"""What `trueup train` runs when no recipe is named."""

_SUFFIX = ".toml"


def names() -> tuple[str, ...]:
    """Names of all recipes, sorted."""
    entries = (entry.name for entry in files("trueup.recipes").iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in entries if name.endswith(_SUFFIX)))


def text(name: str) -> str:
    """A recipe as TOML, for `config.load`.

    Raises:
        ConfigError: There is no such recipe; the message names the nearest one.
    """
    known = names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"unknown recipe {name!r}{hint} (recipes: {', '.join(known)})",
            field="recipe",
            rule=f"one of {', '.join(known)}",
            value=name,
        )
    return (files("trueup.recipes") / f"{name}{_SUFFIX}").read_text(encoding="utf-8")
