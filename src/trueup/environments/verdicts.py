"""Verdicts by content: equal programs on equal cases are graded once.

The key covers all that a verdict depends on, so a hit is the verdict. Two equal programs at the
same time run once and the second waits. A fault is not a verdict: it reaches all who wait and is
forgotten, so the next one tries again.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def verdict_key(*parts: Any) -> str:
    """Digest of JSON-able parts; different parts give different keys."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class VerdictCache:
    """Rewards in memory, shared by the attempts of one environment; safe between threads.

    Args:
        enabled: False grades every time.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._lock = threading.Lock()
        self._verdicts: dict[str, Future[float]] = {}

    def get(self, key: str, grade: Callable[[], float]) -> tuple[float, bool]:
        """The reward for a key and whether it was known, grading if it is not.

        Raises:
            Fault: What `grade` raised, also if another thread called it.
        """
        if not self._enabled:
            return grade(), False
        with self._lock:
            known = self._verdicts.get(key)
            if known is None:
                mine = self._verdicts[key] = Future[float]()
        if known is not None:
            return known.result(), True
        try:
            reward = grade()
        except BaseException as error:
            with self._lock:
                del self._verdicts[key]
            mine.set_exception(error)
            raise
        mine.set_result(reward)
        return reward, False
