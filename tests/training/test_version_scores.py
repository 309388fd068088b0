import pytest

from trueup import config
from trueup.training.version_scores import versions_needed


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        (["attribution.share=0", "probe.every=0"], 0),
        # a probe is scored behind the update that ran meanwhile
        (["attribution.share=0"], 1),
        (["attribution.share=0", "sync.delay=2"], 3),
        # lags 0 to 2, behind a fused update 1 to 3, and the version before the oldest
        (["schedule.staleness=2"], 4),
        (["schedule.staleness=2", "attribution.label_test=0"], 3),
        (["schedule.staleness=0", "sync.delay=3"], 5),
    ],
)
def test_versions_are_kept_as_far_back_as_attribution_asks(
    overrides: list[str], needed: int
) -> None:
    assert versions_needed(config.load("", overrides)) == needed
