import pytest

from trueup import config
from trueup.errors import ConfigError
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
