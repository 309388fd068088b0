"""Which configuration the words of a command line ask for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trueup import config as configuration
from trueup.config import Config
from trueup.errors import ConfigError, UsageError
from trueup.recipes import table

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A configuration, and where it is from."""

    source: str
    """Recipe or file."""
    stem: str
    """What runs of it are called."""
    config: Config


@dataclass(frozen=True, kw_only=True)
class Words:
    """`[RECIPE] [key.path=value ...]`, told apart by the equals sign."""

    recipes: tuple[str, ...]
    overrides: tuple[str, ...]

    @classmethod
    def of(cls, first: str | None, others: Sequence[str] | None) -> Words:
        """Sort the words of a command line; the recipe may be missing or come late."""
        words = [word for word in (first, *(others or ())) if word is not None]
        return cls(
            recipes=tuple(word for word in words if "=" not in word),
            overrides=tuple(word for word in words if "=" in word),
        )


def select(words: Words, file: Path | None) -> Selection:
    """Read a recipe or a file, and apply the overrides.

    Raises:
        UsageError: A recipe and a file, or two recipes.
        ConfigError: The configuration is wrong.
    """
    if file is not None:
        if words.recipes:
            raise UsageError(
                "a recipe and --config exclude each other",
                field="--config",
                rule="alone, without a recipe",
                value=words.recipes[0],
            )
        toml, source, stem = read(file), str(file), _NOT_IN_A_NAME.sub("-", file.stem)
    else:
        source = stem = _only(words.recipes)
        toml = table.text(source)
    config = configuration.load(toml, words.overrides, source=source)
    return Selection(source=source, stem=stem, config=config)


def read(file: Path) -> str:
    """Text of a configuration file.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the configuration {file} cannot be read: {error}",
            field="--config",
            rule="a readable TOML file",
            value=str(file),
        ) from None


def _only(recipes: Sequence[str]) -> str:
    if not recipes:
        return table.DEFAULT
    first, *more = recipes
    if more:
        raise UsageError(
            field="arguments",
            rule="at most one recipe, and changes of the form key.path=value",
            value=" ".join(recipes),
        )
    if first.endswith(".toml"):
        raise UsageError(
            f"unknown recipe {first!r}; a file is given as --config {first}",
            field="recipe",
            rule="the name of a recipe",
            value=first,
        )
    return first
