"""Which environments exist.

To add one: a file beside this one with a class that satisfies `base.Environment` and a factory
`(config, sandbox) -> Environment`; a line in `ENVIRONMENTS`; its name in `EnvironmentConfig.kind`.
`tests/contracts/test_environment.py` then runs over it by itself. Entries are strings, so that what
one environment imports costs nothing to the users of another.
"""

from __future__ import annotations

import importlib

from trueup.config import Config
from trueup.environments.base import Environment
from trueup.environments.sandbox.base import Sandbox

ENVIRONMENTS: dict[str, str] = {
    "bugfix": "trueup.environments.bugfix:build",
}
"""`environment.kind` -> "module:factory"."""


def build(config: Config, sandbox: Sandbox) -> Environment:
    """The environment that a configuration names; it owns the sandbox from then on."""
    module, _, factory = ENVIRONMENTS[config.environment.kind].partition(":")
    environment: Environment = getattr(importlib.import_module(module), factory)(config, sandbox)
    return environment
