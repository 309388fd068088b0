import math
from dataclasses import replace

import pytest
import torch

from support.gaps import make_gap
from trueup.corrections.cause import part_of
from trueup.corrections.compose import correct
from trueup.errors import DataError

# log μ, log π_v, log π_old: engine −.5, .25, 0; staleness 1, −.5, −1.
BEHAVIOUR = [[-2.0, -1.5], [-1.0]]
VERSION = [[-2.5, -1.25], [-1.0]]
TARGET = [[-1.5, -1.75], [-2.0]]
GAP = make_gap(TARGET, BEHAVIOUR, version_logps=VERSION, rewards=[1, 0])


@pytest.mark.parametrize(
    ("on", "d"),
    [
        ("total", [0.5, -0.25, -1.0]),
        ("staleness", [1.0, -0.5, -1.0]),
        ("engine", [-0.5, 0.25, 0.0]),
    ],
)
def test_a_part_of_the_gap_is_corrected_as_the_whole_would_be(on, d):
    assert part_of(GAP, on).log_ratio.tolist() == d
    made = correct(GAP, preset="is", on=on)
    assert made.weight.tolist() == pytest.approx([math.exp(x) for x in d], rel=1e-6)
    # What is recorded of the gap is always the whole of it.
    assert made.metrics["gap/log_ratio"].sum == -0.75


def test_the_parts_multiply_to_the_whole():
    stale, engine, total = (
        correct(GAP, preset="is", on=on).weight for on in ("staleness", "engine", "total")
    )
    torch.testing.assert_close(stale * engine, total)


@pytest.mark.parametrize("on", ["staleness", "engine"])
def test_a_part_needs_every_token_scored_under_its_own_version(on):
    for gap, missing in (
        (replace(GAP, logp_version=None), "3 of 3"),
        (make_gap(TARGET, BEHAVIOUR, version_logps=[[-2.5, math.nan], [-1.0]]), "1 of 3"),
    ):
        with pytest.raises(DataError, match=f"logp_version must be known.*{missing}"):
            correct(gap, preset="tis", on=on)


@pytest.mark.parametrize("on", ["staleness", "engine"])
def test_a_token_without_a_known_behaviour_log_prob_is_excluded_from_every_part(on):
    gap = make_gap(TARGET, [[-2.0, math.nan], [-1.0]], version_logps=VERSION, rewards=[1, 0])
    assert correct(gap, preset="tis", on=on).keep.tolist() == [True, False, True]


def test_the_probabilities_of_a_part_are_those_of_its_policies():
    # π_v − μ = .6 − .9 < −δ with A < 0 is rejected; π_old − μ = 0 is not.
    p9, p6 = math.log(0.9), math.log(0.6)
    gap = make_gap([[p9], [p9]], [[p9], [p9]], version_logps=[[p6], [p6]], rewards=[1, 0])
    assert correct(gap, preset="dppo", on="engine").keep.tolist() == [True, False]
    assert correct(gap, preset="dppo").keep.all()
