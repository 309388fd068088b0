from hypothesis import given
from hypothesis import strategies as st

from trueup.reports.intervals import intersect, length, merge, overlap, within

TIMES = st.integers(0, 40)
INTERVALS = st.lists(st.tuples(TIMES, TIMES).map(lambda p: (float(min(p)), float(max(p)))))


def covered(intervals, second):
    return any(start <= second < stop for start, stop in intervals)


def test_touching_and_overlapping_intervals_become_one():
    assert merge([(4, 5), (0, 2), (1, 3), (3, 3.5)]) == [(0, 3.5), (4, 5)]


def test_a_gap_that_is_small_enough_is_bridged():
    assert merge([(0, 1), (1.5, 2), (4, 5)], gap=0.5) == [(0, 2), (4, 5)]


def test_empty_and_reversed_intervals_cover_nothing():
    assert merge([(1, 1), (3, 2)]) == []
    assert overlap([(0, 1)], []) == 0


@given(INTERVALS, INTERVALS)
def test_overlap_counts_the_seconds_that_lie_in_both(left, right):
    both = [s for s in range(40) if covered(left, s) and covered(right, s)]
    assert overlap(left, right) == len(both)
    assert intersect(left, right) == intersect(right, left)


@given(INTERVALS)
def test_merging_keeps_what_is_covered(intervals):
    merged = merge(intervals)
    assert [covered(merged, s) for s in range(40)] == [covered(intervals, s) for s in range(40)]
    assert length(intervals) == sum(covered(intervals, s) for s in range(40))


@given(INTERVALS, st.tuples(TIMES, TIMES))
def test_within_is_overlap_with_one_window(intervals, ends):
    window = (float(min(ends)), float(max(ends)))
    assert within(merge(intervals), window) == overlap(intervals, [window])
