"""Run directories to report on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.run_writer import RunWriter, episode_row
from support.simulated_run import simulate
from trueup.records.tokens import EpisodeRow


@pytest.fixture
def writer(tmp_path: Path) -> Callable[..., RunWriter]:
    def make(name: str = "demo", *overrides: str) -> RunWriter:
        return RunWriter(tmp_path, name, overrides)

    return make


@pytest.fixture
def simulated(tmp_path: Path) -> Callable[..., Path]:
    return lambda **more: simulate(tmp_path, **more)


@pytest.fixture
def row() -> Callable[..., EpisodeRow]:
    return episode_row
