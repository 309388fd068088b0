"""What a run gained on held-out tasks, with an interval.

Both evaluations ask the same tasks, so the gain is that of each task, averaged: what makes tasks
hard or easy drops out. The interval is that of the bootstrap over tasks (Efron 1979, percentiles):
it says what other tasks of this kind would have shown, not what another training run would.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

_RESAMPLES = 2000
_LEVEL = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Change of the pass rate, and a 95 % interval of it."""

    mean: float
    low: float
    high: float
    tasks: int

    def __str__(self) -> str:
        """For people, e.g. `+0.31 (95 % interval +0.25 to +0.37, 240 tasks)`."""
        interval = f"95 % interval {self.low:+.2f} to {self.high:+.2f}"
        return f"{self.mean:+.2f} ({interval}, {self.tasks} tasks)"


def paired_gain(before: Mapping[str, Any], after: Mapping[str, Any]) -> Gain | None:
    """The gain between two evaluations.

    Args:
        before: Payload of an `eval` event.
        after: That of a later one.

    Returns:
        None if no task is in both, or the records are too old to say.
    """
    first, last = _rates(before), _rates(after)
    differences = [last[task] - first[task] for task in first if task in last]
    if not differences:
        return None
    chance = random.Random(0)
    means = sorted(
        fmean(chance.choices(differences, k=len(differences))) for _ in range(_RESAMPLES)
    )
    tail = round(_RESAMPLES * (1 - _LEVEL) / 2)
    return Gain(
        mean=fmean(differences), low=means[tail], high=means[-tail - 1], tasks=len(differences)
    )


def _rates(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Task -> its pass rate."""
    return {task: passed / episodes for task, passed, episodes in evaluation.get("by_task", ())}
