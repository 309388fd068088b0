from __future__ import annotations

from collections.abc import Iterator

import pytest

from trueup.environments.sandbox.base import Sandbox
from trueup.environments.sandbox.table import resolve
from trueup.errors import SandboxUnavailable


@pytest.fixture(scope="session")
def isolating() -> Iterator[Sandbox]:
    """The strongest sandbox of this machine."""
    try:
        sandbox = resolve("auto")
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield sandbox
    sandbox.close()
