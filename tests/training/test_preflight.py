from pathlib import Path

import pytest

from trueup import config
from trueup.errors import CheckpointError, ConfigError
from trueup.training import preflight

BYPASS = ("sandbox.kind=none", "train.mode=bypass")


@pytest.mark.parametrize(
    "chosen",
    [["correction.preset=tis"], ["correction.preset=ais"], ["correction.normalize=true"]],
    ids=str,
)
def test_bypass_with_a_correction_that_weighs_is_refused(chosen: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"train\.mode must be decoupled"):
        preflight.check(config.load("", ["correction.preset=none", *BYPASS, *chosen]))


@pytest.mark.parametrize("preset", ["none", "mis", "geo"])
def test_bypass_with_a_correction_that_only_rejects_may_run(preset: str) -> None:
    preflight.check(config.load("", [*BYPASS, f"correction.preset={preset}"]))


def test_the_tiny_agent_is_refused_where_any_text_may_occur() -> None:
    with pytest.raises(ConfigError, match=r"model\.path must be a language model where"):
        preflight.check(config.load("", ["environment.kind=arithmetic"]))


def test_a_model_of_no_known_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(CheckpointError, match=r"did you mean smollm2-135m\?"):
        preflight.check(config.load("", ["sandbox.kind=none", "model.path=smollm2"]))


def test_a_named_model_that_is_still_to_be_made_may_run_where_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUEUP_CACHE", str(tmp_path))
    chosen = config.load("", ["sandbox.kind=none", "model.path=smollm2-135m"])
    preflight.check(chosen)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="package gguf"):
        preflight.check(chosen)
