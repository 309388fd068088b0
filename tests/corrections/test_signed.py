import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.gaps import make_gap, ratio_gap
from trueup.corrections.compose import correct

LN2 = math.log(2)
# The first has A > 0, the second A < 0; products 1/4 and 1/4, then 4 and 4.
DOWN = ratio_gap([[-LN2, -LN2], [-LN2, -LN2]], rewards=[1, 0])
UP = ratio_gap([[LN2, LN2], [LN2, LN2]], rewards=[1, 0])
T, F = True, False


def test_off_policy_sequence_masking_drops_bad_episodes_that_became_unlikely():
    made = correct(DOWN, preset="opsm", advantage="group")
    assert made.keep.tolist() == [T, T, F, F]  # −mean d = .693 > .1, and A < 0
    assert made.weight.tolist() == pytest.approx([0.5, 0.5, 0, 0])
    # After the baselines: the reward of what it drops stays in them.
    assert made.advantages.tolist() == [0.5, 0.5, -0.5, -0.5]
    assert correct(UP, preset="opsm").keep.all()
    assert correct(DOWN, preset="opsm", params={"delta": 0.7}).keep.all()


def test_the_move_of_a_probability_is_bounded_in_the_direction_of_the_update():
    # π − μ = .3, −.3 in both episodes: with A > 0 the first has moved far enough, with A < 0 the
    # second.
    target = [math.log(0.8), math.log(0.2)]
    behaviour = [math.log(0.5), math.log(0.5)]
    made = correct(make_gap([target] * 2, [behaviour] * 2, rewards=[1, 0]), preset="dppo")
    assert made.keep.tolist() == [F, T, T, F]
    assert made.weight.tolist() == pytest.approx([0, 0.4, 1.6, 0], rel=1e-6)
    rare = [math.log(0.02)], [math.log(0.002)]  # ten times as likely, and yet only .018
    assert correct(make_gap([rare[0]] * 2, [rare[1]] * 2), preset="dppo").keep.all()


@pytest.mark.parametrize(("gap", "expected"), [(DOWN, [1, 1, 0.25, 0.25]), (UP, [1, 1, 1, 1])])
def test_tapering_weighs_only_bad_episodes_and_only_downwards(gap, expected):
    assert correct(gap, preset="topr").weight.tolist() == pytest.approx(expected)


def test_soft_weights_by_hand():
    # W = 1/4: good (1/4)² e^(3·3/4) = .592983, bad (1/4)³ e^(2·3/4) = .070026.
    # W = 4: good 16 e^−9 = .0019746, bad 64 e^−6 = .158640.
    assert correct(DOWN, preset="vespo").weight.tolist() == pytest.approx(
        [0.592983, 0.592983, 0.070026, 0.070026], rel=1e-4
    )
    assert correct(UP, preset="vespo").weight.tolist() == pytest.approx(
        [0.0019746, 0.0019746, 0.158640, 0.158640], rel=1e-4
    )


@given(
    d=st.floats(-60, 60, width=32),
    k=st.floats(0.5, 6),
    rate=st.floats(0.5, 6),
)
def test_soft_weights_are_largest_where_the_ratio_is_k_over_lambda(d, k, rate):
    params = {"k_good": k, "lambda_good": rate, "k_bad": k, "lambda_bad": rate}
    largest = (k / rate) ** k * math.exp(rate - k)
    made = correct(ratio_gap([[d], [d]]), preset="vespo", params=params)
    assert float(made.weight.max()) <= largest * (1 + 1e-5)
    at = correct(ratio_gap([[math.log(k / rate)]] * 2), preset="vespo", params=params)
    assert float(at.weight[0]) == pytest.approx(largest, rel=1e-5)
