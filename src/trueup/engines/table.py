"""The inference engines, by the name that `engine.kind` takes.

To add one: write `engines/<name>.py` with a class that implements `engines.base.Engine` and a
factory with the signature of `Build`, add one line here, and add it to the fixture of
`tests/contracts/test_engine.py`, which then holds it to the contract. (The scripted double has no
line: a test builds it itself.)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trueup.config import EngineConfig
from trueup.engines.base import Engine
from trueup.errors import ConfigError
from trueup.types import WeightManifest

if TYPE_CHECKING:
    from torch import Tensor

ENGINES = {
    "embedded": "trueup.engines.embedded.engine:build",
    "openai": "trueup.engines.openai.build:build",
    "transformers": "trueup.engines.batching.build:build",
    "vllm": "trueup.engines.vllm.build:build",
}
"""Name -> `module:factory`; nothing is imported before it is asked for."""


class Build(Protocol):
    """A factory of engines, in the process that is to hold one."""

    def __call__(
        self,
        config: EngineConfig,
        *,
        model: Path,
        engine_id: str,
        epoch: int,
        fetch: Callable[[WeightManifest], dict[str, Tensor]],
        digest: Callable[[Mapping[str, Tensor]], str],
        paced: bool,
    ) -> Engine:
        """An empty engine: its first `load` makes it serve.

        Args:
            config: Section `engine` of the run's configuration.
            model: Directory that gives the architecture.
            engine_id: Its name.
            epoch: How often it had been started before.
            fetch: Reads and verifies a published version.
            digest: Of the tensors that it holds.
            paced: It decodes only when told to, for runs on logical time.
        """
        ...


def factory(name: str) -> Build:
    """Import the factory of an engine.

    Raises:
        ConfigError: No engine has this name.
    """
    if name not in ENGINES:
        raise ConfigError(field="engine.kind", rule=f"one of {sorted(ENGINES)}", value=name)
    module, _, attribute = ENGINES[name].partition(":")
    found: Build = getattr(importlib.import_module(module), attribute)
    return found
