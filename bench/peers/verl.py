"""verl's rollout correction, run from its own wheel without the packages around it.

Only the helper, its config dataclass and the masked reductions it calls are executed, unmodified;
the packages above them (Ray, TensorDict, the workers) are replaced by empty modules while they
load. So the peer runs in this process, on the same torch, in the same minute.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

PACKAGES = (
    "verl",
    "verl.trainer",
    "verl.trainer.config",
    "verl.trainer.ppo",
    "verl.utils",
    "verl.workers",
    "verl.workers.config",
)
"""Packages whose `__init__` is not run: their modules are found, their dependencies are not."""


class Protocol:
    """What the helper wraps its weights in: a holder of named tensors."""

    @staticmethod
    def from_dict(tensors: dict[str, Any]) -> SimpleNamespace:
        """Hold them under `batch`."""
        return SimpleNamespace(batch=tensors)


STUBS: dict[str, dict[str, object]] = {
    "verl.protocol": {"DataProto": Protocol},
    "verl.workers.config.actor": {"PolicyLossConfig": object},
    "verl.utils.device": {"get_device_name": lambda: "cpu", "get_torch_device": lambda: None},
    "tensordict": {"TensorDict": dict},
    "transformers": {"PreTrainedTokenizer": object},
}
"""Names that the loaded modules import and the correction never uses."""


def site_packages(environment: Path) -> Path:
    """The folder of an environment that holds its packages."""
    found = sorted(environment.glob("lib/python*/site-packages"))
    return found[0] if found else environment


def version(environment: Path) -> str:
    """The installed version of verl."""
    where = [str(site_packages(environment))]
    return next(importlib.metadata.distributions(name="verl", path=where)).version


def load(environment: Path) -> ModuleType:
    """The module `verl.trainer.ppo.rollout_corr_helper` of that environment.

    Raises:
        ModuleNotFoundError: verl is not installed there.
    """
    root = site_packages(environment)
    if not (root / "verl").is_dir():
        raise ModuleNotFoundError(f"no verl in {environment}; make it with scripts/bench-env")
    with _stubbed(root):
        return importlib.import_module("verl.trainer.ppo.rollout_corr_helper")


@contextlib.contextmanager
def _stubbed(root: Path) -> Iterator[None]:
    """Stand-ins in place of what is not loaded, and afterwards the modules that were there."""
    before = dict(sys.modules)
    for name in PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package
    for name, members in STUBS.items():
        module = ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in set(sys.modules) - set(before):
            if name.partition(".")[0] in {"verl", "tensordict", "transformers"}:
                del sys.modules[name]
        sys.modules.update(before)
