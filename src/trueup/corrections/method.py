"""What a user chose: a preset, filters of other presets before it, and their constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from trueup.corrections.preset import Constants, Preset, Scope
from trueup.corrections.table import find_filter

Filters = Mapping[str, Mapping[str, float]]
"""Added filters in their order: name of a preset that rejects -> overrides of its constants."""

_SCOPES: tuple[Scope, ...] = get_args(Scope)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A preset with its constants."""

    preset: Preset
    constants: Constants


def parts(preset: Preset, params: Mapping[str, float], filters: Filters) -> tuple[Part, ...]:
    """What rejects, in order: the added filters, then the preset itself, which also weighs.

    Args:
        preset: The method.
        params: Overrides of its constants.
        filters: Added filters.

    Raises:
        ConfigError: A filter or a constant is unknown, or a constant is out of range.
    """
    added = [(name, find_filter(name), constants) for name, constants in filters.items()]
    return (
        *(
            Part(preset=item, constants=item.resolve(given, key=f"correction.filters.{name}"))
            for name, item, given in added
        ),
        Part(preset=preset, constants=preset.resolve(params)),
    )


def widest(scopes: Sequence[Scope]) -> Scope:
    """The one that needs most."""
    return max(scopes, key=_SCOPES.index)
