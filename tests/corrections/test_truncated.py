import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.gaps import ratio_gap
from trueup.corrections.compose import correct

LN2, LN4 = math.log(2), math.log(4)
GAP = ratio_gap([[LN2, LN4], [-LN2, -LN4, LN2]], rewards=[1, 0], turns=[[0, 1], [0, 0, 1]])


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("none", [1, 1, 1, 1, 1]),
        ("is", [2, 4, 0.5, 0.25, 2]),
        ("seq-is", [8, 8, 0.25, 0.25, 0.25]),
        ("tis", [2, 2, 0.5, 0.25, 2]),
        ("clip", [2, 2, 0.5, 0.5, 2]),
        ("seq-tis", [2, 2, 0.25, 0.25, 0.25]),
        ("turn-tis", [2, 2, 0.125, 0.125, 2]),
        # Prefix products 2, 8 and 1/2, 1/8, 1/4.
        ("minpro", [2, 2, 0.5, 0.125, 0.125]),
    ],
)
def test_weights_by_hand(preset, expected):
    made = correct(GAP, preset=preset)
    assert made.keep.all()
    assert made.weight.tolist() == pytest.approx(expected, rel=1e-6)


ratios = st.lists(
    st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=5), min_size=2, max_size=5
)


@given(rows=ratios)
def test_without_a_binding_cap_truncation_is_importance_sampling(rows):
    gap = ratio_gap(rows)
    for capped, free in (("tis", "is"), ("seq-tis", "seq-is")):
        first = correct(gap, preset=capped, params={"cap": 1e12})
        assert torch.equal(first.weight, correct(gap, preset=free).weight)


@given(row=st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=6))
def test_episodes_of_one_token_have_one_level(row):
    gap = ratio_gap([[d] for d in row])
    expected = correct(gap, preset="tis").weight
    for preset in ("seq-tis", "turn-tis", "minpro"):
        assert torch.equal(correct(gap, preset=preset).weight, expected)


@given(rows=ratios)
def test_a_turn_that_is_the_whole_episode_weighs_as_the_episode(rows):
    gap = ratio_gap(rows)
    assert torch.equal(
        correct(gap, preset="turn-tis").weight, correct(gap, preset="seq-tis").weight
    )
