import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueup.reports.svg import Scale, nice_step, number, runs, scale_for

FINITE = st.floats(-1e6, 1e6, allow_nan=False)


def test_steps_are_one_two_or_five_times_a_power_of_ten():
    assert [nice_step(r) for r in (0.03, 0.2, 0.21, 7, 10)] == pytest.approx(
        [0.05, 0.2, 0.5, 10, 10]
    )


def test_ticks_of_a_linear_scale():
    assert Scale(0, 1, 0, 100).ticks() == [0, 0.2, 0.4, 0.6, 0.8, 1]


def test_an_integer_scale_has_whole_ticks_however_short():
    assert Scale(-0.5, 2.5, 0, 100, integer=True).ticks() == [0, 1, 2]


def test_ticks_of_a_log_scale():
    assert Scale(0.001, 1000, 0, 100, log=True).ticks() == pytest.approx(
        [0.001, 0.01, 0.1, 1, 10, 100, 1000]
    )
    assert Scale(0.1, 1, 0, 100, log=True).ticks() == pytest.approx([0.1, 0.2, 0.5, 1])


def test_a_log_scale_maps_equal_factors_to_equal_lengths():
    scale = Scale(0.01, 100, 0, 400, log=True)
    assert [scale(v) for v in (0.01, 0.1, 1, 100, 0)] == pytest.approx([0, 100, 200, 400, 0])


@given(st.lists(FINITE, min_size=1), st.booleans())
def test_every_value_lies_within_the_scale(values, log):
    kind = "log" if log else "linear"
    scale = scale_for({"label": "", "scale": kind}, values, 10, 90)
    assert scale.low < scale.high
    rounding = 1e-6 * (scale.high - scale.low)
    for value in values:
        assert 10 <= scale(value) <= 90
        if not log:
            assert scale.low - rounding <= value <= scale.high + rounding
    assert all(math.isfinite(tick) for tick in scale.ticks())
    assert len(scale.ticks()) < 20


def test_numbers_are_short():
    values = [0, 0.25, 12000, 3e-5, 1e-4, 1e7, -0.5]
    assert [number(v) for v in values] == ["0", "0.25", "12k", "3·10⁻⁵", "10⁻⁴", "10⁷", "-0.5"]


def test_a_line_on_a_log_axis_is_cut_at_zero():
    assert runs([0, 1, 2], [0.0, 1.0, -1.0], above=0.0) == [[(1, 1.0)]]


def test_a_line_is_cut_where_a_value_is_missing():
    assert runs([0, 1, 2, 3], [1.0, None, 2.0, 3.0]) == [[(0, 1.0)], [(2, 2.0), (3, 3.0)]]
