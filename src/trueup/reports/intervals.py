"""Arithmetic of half-open time intervals: how long did these two things happen at once?"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice

Interval = tuple[float, float]


def merge(intervals: Iterable[Interval], *, gap: float = 0.0) -> list[Interval]:
    """The union as sorted disjoint intervals; those at most `gap` apart become one.

    Example: `merge([(0, 2), (1, 3), (4, 5)])` is `[(0, 3), (4, 5)]`.
    """
    merged: list[Interval] = []
    for start, stop in sorted(i for i in intervals if i[1] > i[0]):
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Time covered by the union."""
    return sum(stop - start for start, stop in merge(intervals))


def intersect(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """What lies in both unions; linear in the number of intervals after sorting."""
    a, b = merge(left), merge(right)
    found: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            found.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def within(merged: Sequence[Interval], window: Interval) -> float:
    """Time of `window` that lies in a union which `merge` made; logarithmic but for the hits."""
    total = 0.0
    first = max(0, bisect_right(merged, window[0], key=lambda interval: interval[0]) - 1)
    for start, stop in islice(merged, first, None):
        if start >= window[1]:
            break
        total += max(0.0, min(stop, window[1]) - max(start, window[0]))
    return total


def overlap(left: Iterable[Interval], right: Iterable[Interval]) -> float:
    """Time that lies in both unions."""
    return length(intersect(left, right))
