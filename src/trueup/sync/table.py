"""The transports by name.

To add one: a module here with `build(root: Path) -> Transport`, a line in `TRANSPORTS`, and, if it
can serve engines in other processes, its name in `config.SyncConfig.transport`. The suite in
tests/contracts/test_transport.py runs over every line.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from trueup.config import SyncConfig
from trueup.errors import ConfigError

if TYPE_CHECKING:
    from trueup.sync.base import Transport

TRANSPORTS = {
    "filesystem": "trueup.sync.filesystem",
    "inprocess": "trueup.sync.inprocess",
    "shared_memory": "trueup.sync.shared_memory",
}
"""Name -> module, imported when asked for."""


def build(config: SyncConfig, root: Path) -> Transport:
    """The transport of a run.

    Args:
        config: Section `sync` of the run's configuration.
        root: Directory of the run; every process of the run gives the same one.
    """
    return open_transport(config.transport, root)


def open_transport(name: str, root: Path) -> Transport:
    """A transport by name.

    Raises:
        ConfigError: There is no such transport.
    """
    if name not in TRANSPORTS:
        raise ConfigError(
            field="sync.transport", rule=f"one of {', '.join(TRANSPORTS)}", value=name
        )
    transport: Transport = importlib.import_module(TRANSPORTS[name]).build(root)
    return transport
