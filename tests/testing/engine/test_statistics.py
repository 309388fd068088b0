import math

import pytest

from trueup.testing.engine.statistics import lifts, same_proportion, slope, surprise_z, table

LOG = math.log


def draws(*counts: tuple[int, float, int]) -> list[tuple[int, float]]:
    """Tokens with their probability, each so often."""
    return [(token, LOG(p)) for token, p, n in counts for _ in range(n)]


def test_a_table_is_the_mean_probability_of_each_token():
    assert table([(1, LOG(0.2)), (1, LOG(0.4)), (2, LOG(0.1))]) == pytest.approx({1: 0.3, 2: 0.1})


def test_tokens_that_come_as_often_as_they_say_have_no_surprise():
    half = draws((1, 0.75, 3), (2, 0.25, 1))
    assert surprise_z([half + half]) == pytest.approx(0, abs=1e-9)


def test_the_surprise_of_too_probable_tokens_is_that_of_their_improbability():
    # Both halves: 1 (p .75) three times and 2 (p .25) once, said; tested on four times token 1.
    known, tested = draws((1, 0.75, 3), (2, 0.25, 1)), draws((1, 0.75, 4))
    a, b = -LOG(0.75), -LOG(0.25)
    mean = 0.75 * a + 0.25 * b
    first = 4 * (a - mean), 4 * (0.75 * a**2 + 0.25 * b**2 - mean**2)
    # The other way round only token 1 is known, and the rest counts as one token of a + 1.
    rest = a + 1
    mean = 0.75 * a + 0.25 * rest
    second = 3 * (a - mean) + (rest - mean), 4 * (0.75 * a**2 + 0.25 * rest**2 - mean**2)
    expected = (first[0] + second[0]) / math.sqrt(2 * (first[1] + second[1]))
    assert surprise_z([known + tested]) == pytest.approx(expected)
    assert expected < 0


def test_the_slope_of_halved_differences_is_a_half():
    one = [(1, -1.0), (2, -3.0), (3, -2.0)]
    other = [(1, -1.5), (2, -2.5), (4, -9.0)]
    # Common: tokens 1 and 2, ±1 about their mean under the one, ±.5 under the other.
    assert slope([(one, other)]) == pytest.approx((0.5, 2.0))


def test_nothing_in_common_has_no_slope():
    assert slope([([(1, -1.0)], [(2, -1.0)])]) == (0.0, 0.0)


def test_lifts_are_differences_of_common_tokens():
    assert lifts([(1, -1.0), (2, -3.0)], [(1, -0.75), (3, -2.0)]) == pytest.approx([0.25])


def test_proportions_that_differ_by_all_have_the_chance_of_one_table_and_its_mirror():
    # 4 of 4 against 0 of 4: 2 of the C(8, 4) = 70 ways.
    assert same_proportion(4, 4, 0, 4) == pytest.approx(2 / 70)
    assert same_proportion(2, 4, 2, 4) == pytest.approx(1)
    assert same_proportion(0, 4, 0, 4) == 1.0
