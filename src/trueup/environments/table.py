"""Which environments exist.

To add one: a file beside this one with a class that satisfies `base.Environment` and a factory
`(config, sandbox) -> Environment`; a line in `ENVIRONMENTS`; its name in `EnvironmentConfig.kind`.
`tests/contracts/test_environment.py` then runs over it by itself. Factories are strings, so that
what one environment imports costs nothing to the users of another.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from trueup.config import Config
from trueup.environments.base import Environment
from trueup.environments.sandbox.base import Sandbox
from trueup.environments.sandbox.none import NoSandbox
from trueup.environments.sandbox.table import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """How an environment is made."""

    factory: str
    """`module:function`."""
    runs_code: bool
    """Whether it executes what a model wrote, and so needs a sandbox."""


ENVIRONMENTS: dict[str, Entry] = {
    "arithmetic": Entry(factory="trueup.environments.arithmetic:build", runs_code=False),
    "bugfix": Entry(factory="trueup.environments.bugfix:build", runs_code=True),
}
"""By `environment.kind`."""


def build(config: Config, sandbox: Sandbox) -> Environment:
    """The environment that a configuration names; it owns the sandbox from then on."""
    module, _, factory = ENVIRONMENTS[config.environment.kind].factory.partition(":")
    environment: Environment = getattr(importlib.import_module(module), factory)(config, sandbox)
    return environment


def open_environment(config: Config) -> Environment:
    """The environment that a configuration names, in the sandbox that it names.

    No sandbox is looked for where no code is run.

    Raises:
        SandboxUnavailable: It runs code, and nothing that isolates works here.
    """
    runs_code = ENVIRONMENTS[config.environment.kind].runs_code
    return build(config, resolve(config.sandbox.kind) if runs_code else NoSandbox())
