"""Whole runs that the tests of a session share."""

import os
from pathlib import Path

import pytest

from support.live_runs import Runs, locked
from trueup import config
from trueup.training.runtime_local import base_model


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A root for runs, and the base policy that they start from."""
    own = tmp_path_factory.getbasetemp()
    root = own.parent if os.environ.get("PYTEST_XDIST_WORKER") else own
    shared = root / "runs"
    shared.mkdir(exist_ok=True)
    with locked(shared / "base.lock"):
        base: Path = base_model(config.load())
    return Runs(root=shared, base=base)
