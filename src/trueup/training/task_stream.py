"""The order in which tasks are drawn, and how far it has been trained.

Draw i of the stream is a fixed task: every epoch is a permutation that seed and epoch determine. A
draw is *committed* when its group has been trained, or dropped for good; the low-water mark is the
first draw that is not. A resumed stream goes on from there and skips what was committed beyond it,
so that no draw is lost and none is trained twice.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from trueup.types import Task


class TaskStream:
    """Draws tasks.

    Args:
        tasks: What is drawn from, in a fixed order.
        seed: Of the permutations.
        low_water: First draw that is not committed.
        committed: Draws beyond it that are.
    """

    def __init__(
        self, tasks: Sequence[Task], seed: int, *, low_water: int = 0, committed: Iterable[int] = ()
    ) -> None:
        """Nothing is drawn yet."""
        self._tasks = tasks
        self._seed = seed
        self._low_water = low_water
        self._committed = set(committed)
        self._next = low_water
        self._epochs: dict[int, list[int]] = {}

    def draw(self) -> int:
        """The next draw that is not committed."""
        self._next = max(self._next, self._low_water)
        while self._next in self._committed:
            self._next += 1
        self._next += 1
        return self._next - 1

    def task(self, draw: int) -> Task:
        """Which task a draw is."""
        epoch, position = divmod(draw, len(self._tasks))
        if epoch not in self._epochs:
            order = list(range(len(self._tasks)))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._epochs[epoch] = order
        return self._tasks[self._epochs[epoch][position]]

    def commit(self, draw: int) -> None:
        """A draw is done with; it may be so again, if its group had lost members."""
        if draw >= self._low_water:
            self._committed.add(draw)
        while self._low_water in self._committed:
            self._committed.remove(self._low_water)
            self._low_water += 1

    def state(self) -> dict[str, Any]:
        """What a resumed stream is built from, as JSON."""
        return {"low_water": self._low_water, "committed": sorted(self._committed)}
