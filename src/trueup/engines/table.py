"""The inference engines, by the name that `engine.kind` takes.

To add one: write `engines/<name>.py` with a class that implements `engines.base.Engine`, add one
line here, and add it to the fixture of `tests/contracts/test_engine.py`, which then holds it to
the contract.
"""

from __future__ import annotations

import importlib

from trueup.engines.base import Engine
from trueup.errors import ConfigError

ENGINES = {
    "embedded": "trueup.engines.embedded.engine:EmbeddedEngine",
    "scripted": "trueup.engines.scripted:ScriptedEngine",
}
"""Name -> `module:class`; nothing is imported before it is asked for."""


def engine_class(name: str) -> type[Engine]:
    """Import an engine.

    Raises:
        ConfigError: No engine has this name.
    """
    if name not in ENGINES:
        raise ConfigError(field="engine.kind", rule=f"one of {sorted(ENGINES)}", value=name)
    module, _, attribute = ENGINES[name].partition(":")
    found: type[Engine] = getattr(importlib.import_module(module), attribute)
    return found
