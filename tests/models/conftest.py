from pathlib import Path

import pytest

from trueup.models.load import save_model
from trueup.models.tiny import build_tiny, build_tokenizer

WORDS = ("fix", "clamp", "read", "patch", "+", "-", "x")


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(WORDS, directory)
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Path:
    """A whole model directory; tests that damage one copy it first."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    save_model(build_tiny(13, seed=0), directory, tokenizer_files_from=tokenizer_dir)
    return directory
