import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.gaps import ratio_gap
from trueup.corrections.compose import correct
from trueup.corrections.moment import second_moment_bound


def mask(d, tau=0.04):
    values = torch.tensor(d, dtype=torch.float64)
    return (values.square() < second_moment_bound(values, tau=tau)).tolist()


@pytest.mark.parametrize(
    ("d", "kept"),
    [
        # d² = .01, .04, .09, 1: means .01, .025, .0467, .285.
        ([0.1, -0.2, 0.3, 1.0], [True, True, False, False]),
        ([1.0, 0.3, -0.2, 0.1], [False, False, True, True]),
        ([0.1, 0.1, 0.1], [True, True, True]),
        # Beside the 0 one .25 would fit (mean .031) and three do not (.047): equals go together.
        ([0.0, 0.25, 0.25, 0.25], [True, False, False, False]),
        ([0.3], [False]),
        ([], []),
    ],
)
def test_the_largest_go_until_the_mean_of_the_rest_is_below_tau(d, kept):
    assert mask(d) == kept


def test_a_mean_of_exactly_tau_is_not_below_it():
    assert mask([0.5, 0.5], tau=0.25) == [False, False]


def test_a_token_that_is_excluded_already_makes_no_room_for_others():
    # d² = .01, .09: mean .05 ≥ τ. With the unknown token counted as 0 it would be .033.
    gap = ratio_gap([[0.1, math.nan], [0.3]], rewards=[0, 1])
    made = correct(gap, preset="m2po")
    assert made.keep.tolist() == [True, False, False]
    assert made.weight.tolist() == pytest.approx([math.exp(0.1), 0, 0])


@given(
    d=st.lists(st.floats(-3, 3, width=32), max_size=12),
    tau=st.floats(0.001, 2),
)
def test_the_rest_is_below_tau_and_no_larger_rest_is(d, tau):
    kept = mask(d, tau)
    squares = [x * x for x in d]
    rest = [s for s, k in zip(squares, kept, strict=True) if k]
    gone = [s for s, k in zip(squares, kept, strict=True) if not k]
    if rest:
        assert sum(rest) / len(rest) < tau * (1 + 1e-9)
    if gone:
        assert max(rest, default=-1.0) < min(gone)
        more = rest + [s for s in gone if s == min(gone)]
        assert sum(more) / len(more) >= tau * (1 - 1e-9)
