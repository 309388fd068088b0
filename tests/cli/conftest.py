"""Runs commands in this process, in an empty directory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trueup.cli import main


@dataclass(frozen=True)
class Answer:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The object on the last line of stdout."""
        return json.loads(self.out.splitlines()[-1])

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


FOREIGN = """
import platform, sys
platform.system = lambda: "Darwin"
from trueup.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def trueup_without_sandbox(tmp_path: Path) -> Callable[..., Answer]:
    """The commands on a system on which no sandbox works."""

    def call(*words: str) -> Answer:
        command = [sys.executable, "-c", FOREIGN, *words]
        found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        return Answer(code=found.returncode, out=found.stdout, err=found.stderr)

    return call


@pytest.fixture
def trueup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> Answer:
        code = main(words)
        captured = capsys.readouterr()
        return Answer(code=code, out=captured.out, err=captured.err)

    return call


@pytest.fixture(scope="session")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of an untrained TinyAgent with its tokenizer."""
    import torch

    from trueup.environments.bugfix import vocabulary
    from trueup.models.load import save_model
    from trueup.models.tiny import SPECIALS, build_tiny, build_tokenizer

    torch.set_num_threads(1)
    source = tmp_path_factory.mktemp("source")
    words = vocabulary()
    build_tokenizer(words, source)
    target = source.parent / "model"
    save_model(build_tiny(len(words) + len(SPECIALS), 0), target, tokenizer_files_from=source)
    return str(target)
