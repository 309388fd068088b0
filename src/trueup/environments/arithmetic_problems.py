"""Which arithmetic problems exist, and how each is asked.

Every problem belongs to a pair of operands, whatever their order, and every pair to one split, for
all operators: no held-out operands have been seen together in training. A pair asks several things
(3 + 4, 4 + 3, 4 - 3, ...): training takes them all, evaluation one of each pair, by turns, so that
held-out problems are independent of each other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from trueup.errors import ConfigError
from trueup.types import Task

HELDOUT = 240
"""Held-out problems of a level, one per pair of operands."""

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """How hard problems are."""

    largest: int
    """Operands are 1 to this."""
    signs: str
    """Operators: some of + - *."""


LEVELS: Mapping[int, Level] = MappingProxyType(
    {
        1: Level(largest=30, signs="+"),
        2: Level(largest=30, signs="+-"),
        3: Level(largest=30, signs="+-*"),
        4: Level(largest=99, signs="+-*"),
    }
)
"""By `environment.level`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Two operands and what to do with them."""

    left: int
    sign: str
    right: int

    @property
    def text(self) -> str:
        """As one writes it: `3 + 4`."""
        return f"{self.left} {self.sign} {self.right}"

    @property
    def prompt(self) -> str:
        """What the agent is shown: the solved examples, whose form its answer is to have."""
        solved = (f"{_question(example)} {example.text} = {example.answer}" for example in EXAMPLES)
        return "\n".join([*solved, _question(self)])

    @property
    def answer(self) -> int:
        """The right number; never negative."""
        match self.sign:
            case "+":
                return self.left + self.right
            case "-":
                return self.left - self.right
            case _:
                return self.left * self.right

    @property
    def pair(self) -> Pair:
        """The operands, smaller first."""
        return min(self.left, self.right), max(self.left, self.right)


EXAMPLES = (Problem(left=9, sign="+", right=8),)
"""Shown, solved, before every problem, so their operands are in no split."""


def problems(level: int) -> dict[Task, Problem]:
    """The problems of a level: `heldout` first, then `train`, each by index; always the same.

    Raises:
        ConfigError: There is no such level.
    """
    if level not in LEVELS:
        raise ConfigError(
            field="environment.level", rule=f"{min(LEVELS)} to {max(LEVELS)}", value=level
        )
    chosen = LEVELS[level]
    numbers = range(1, chosen.largest + 1)
    shown = {example.pair for example in EXAMPLES}
    pairs = [(low, high) for low in numbers for high in range(low, chosen.largest + 1)]
    pairs = [pair for pair in pairs if pair not in shown]
    random.Random(f"arithmetic/{level}").shuffle(pairs)
    heldout = [_turn(pair, chosen, index) for index, pair in enumerate(pairs[:HELDOUT])]
    train = [problem for pair in pairs[HELDOUT:] for problem in _all_of(pair, chosen)]
    return {
        Task(id=f"{split}-{index:05d}: {problem.text}", split=split): problem
        for split, found in (("heldout", heldout), ("train", train))
        for index, problem in enumerate(found)
    }


def _question(problem: Problem) -> str:
    return f"Q: What is {problem.text}?\nA:"


def _turn(pair: Pair, level: Level, index: int) -> Problem:
    """One problem of a pair: operators take turns by index."""
    sign = level.signs[index % len(level.signs)]
    return next(problem for problem in _all_of(pair, level) if problem.sign == sign)


def _all_of(pair: Pair, level: Level) -> Iterator[Problem]:
    """Every problem of a pair: the larger operand first, then, where that is another one, last."""
    low, high = pair
    for sign in level.signs:
        yield Problem(left=high, sign=sign, right=low)
        if sign != "-" and low != high:
            yield Problem(left=low, sign=sign, right=high)
