import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.gaps import ratio_gap
from trueup.corrections.levels import (
    GEOMETRIC,
    LARGEST,
    LEAST,
    PREFIX_MIN,
    PRODUCT,
    TOKEN,
    TURN_GEOMETRIC,
    TURN_PRODUCT,
)
from trueup.errors import DataError

NAN = math.nan
GAP = ratio_gap([[0.5, -1.0, 0.25, 1.0], [], [-2.0]], turns=[[0, 0, 1, 1], [], [0]])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (TOKEN, [0.5, -1.0, 0.25, 1.0, -2.0]),
        (PRODUCT, [0.75] * 4 + [-2.0]),
        (GEOMETRIC, [0.1875] * 4 + [-2.0]),
        (LEAST, [-1.0] * 4 + [-2.0]),
        (LARGEST, [1.0] * 4 + [-2.0]),
        (TURN_PRODUCT, [-0.5, -0.5, 1.25, 1.25, -2.0]),
        (TURN_GEOMETRIC, [-0.25, -0.25, 0.625, 0.625, -2.0]),
        # Running sums .5, −.5, −.25, .75 and the least of them so far.
        (PREFIX_MIN, [0.5, -0.5, -0.5, -0.5, -2.0]),
    ],
)
def test_each_level_by_hand(level, expected):
    assert level.log_ratio(GAP).tolist() == expected


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (PRODUCT, [0.75] * 3 + [0.0]),
        (GEOMETRIC, [0.375] * 3 + [0.0]),
        (LEAST, [0.25] * 3 + [0.0]),
        (LARGEST, [0.5] * 3 + [0.0]),
        (PREFIX_MIN, [0.5, 0.5, 0.5, 0.0]),
    ],
)
def test_a_token_without_a_known_log_prob_is_left_out(level, expected):
    # Two known tokens, .5 and .25, around an unknown one; and an episode of nothing else.
    assert level.log_ratio(ratio_gap([[0.5, NAN, 0.25], [NAN]])).tolist() == expected


def test_products_are_not_clamped():
    d = PRODUCT.log_ratio(ratio_gap([[-0.25] * 100, [-2.0] * 100]))
    assert d[[0, 100]].tolist() == [-25.0, -200.0]


@pytest.mark.parametrize("level", [TURN_PRODUCT, TURN_GEOMETRIC])
def test_a_turn_needs_turns_and_ends_with_its_episode(level):
    with pytest.raises(
        DataError, match="turn must be given for a correction at the level of turns"
    ):
        level.log_ratio(replace(GAP, turn=None))
    # Both episodes call their only turn 0.
    assert level.log_ratio(ratio_gap([[1.0], [2.0]])).tolist() == [1.0, 2.0]


@given(rows=st.lists(st.lists(st.floats(-5, 5, width=32), max_size=9), min_size=1, max_size=5))
def test_the_least_prefix_is_that_of_a_loop(rows):
    expected = []
    for row in rows:
        total, least = 0.0, math.inf
        for d in row:
            total += d
            least = min(least, total)
            expected.append(least)
    found = PREFIX_MIN.log_ratio(ratio_gap(rows))
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=1e-6)


@given(row=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=9), times=st.integers(2, 5))
def test_the_geometric_mean_does_not_depend_on_repetition(row, times):
    once, again = (GEOMETRIC.log_ratio(ratio_gap([r]))[0] for r in (row, row * times))
    torch.testing.assert_close(once, again, rtol=1e-6, atol=1e-7)
