from __future__ import annotations

import threading
import time

import pytest

from trueup.environments.verdicts import VerdictCache, verdict_key
from trueup.errors import GraderFault


class Grader:
    def __init__(self, reward: float = 1.0) -> None:
        self.runs = 0
        self._reward = reward

    def __call__(self) -> float:
        self.runs += 1
        time.sleep(0.05)
        return self._reward


def test_equal_keys_are_graded_once_and_others_apart() -> None:
    cache, one, two = VerdictCache(), Grader(1.0), Grader(0.0)
    assert cache.get("a", one) == (1.0, False)
    assert cache.get("a", one) == (1.0, True)
    assert cache.get("b", two) == (0.0, False)
    assert (one.runs, two.runs) == (1, 1)


def test_disabled_cache_grades_every_time() -> None:
    cache, grader = VerdictCache(enabled=False), Grader()
    assert [cache.get("a", grader) for _ in range(3)] == [(1.0, False)] * 3
    assert grader.runs == 3


def test_equal_keys_at_once_run_once() -> None:
    cache, grader = VerdictCache(), Grader()
    answers: list[tuple[float, bool]] = []
    threads = [
        threading.Thread(target=lambda: answers.append(cache.get("a", grader))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert grader.runs == 1
    assert sorted(answers) == [(1.0, False)] + [(1.0, True)] * 7


def test_fault_reaches_who_waits_and_is_not_kept() -> None:
    cache = VerdictCache()
    begun, release = threading.Event(), threading.Event()

    def fail() -> float:
        begun.set()
        release.wait()
        raise GraderFault("no verdict")

    caught: list[GraderFault] = []

    def ask() -> None:
        try:
            cache.get("a", fail)
        except GraderFault as fault:
            caught.append(fault)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    threads[0].start()
    begun.wait()
    threads[1].start()
    release.set()
    for thread in threads:
        thread.join()
    assert len(caught) == 2
    with pytest.raises(GraderFault):
        cache.get("a", fail)
    assert cache.get("a", Grader(0.5)) == (0.5, False)


def test_keys_tell_parts_apart() -> None:
    parts = [("a", "b"), ("ab", ""), ("a", ["b"]), ("a", 1), ("a", 1.0), ("a", True), ("b", "a")]
    assert len({verdict_key(*p) for p in parts}) == len(parts)
    assert verdict_key("a", (1, 2)) == verdict_key("a", [1, 2])
