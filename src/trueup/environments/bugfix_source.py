"""The bug-fix tasks: a Latin square of function names and operators, and how a task reads.

A task is a name and its correct operator: 6 names, 5 operators, 30 tasks. Every name occurs once
with every operator, and the issue shows nothing but the name; so whoever does not read the file is
right in exactly one of five, also after memorising all other tasks. The wrong operator that the
file holds is moved from the correct one by 1 ... 4 places, a constant per name: over the training
tasks each ordered pair of different operators occurs exactly once, so the bug says nothing either.

All text is words separated by spaces, so that a policy can have one token per word.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trueup.environments.grading import Case
from trueup.types import Task

OPERATORS: tuple[str, ...] = ("+", "-", "*", "//", "%")
TRAIN_NAMES = ("clamp", "blend", "parse", "trace")
HELDOUT_NAMES = ("fetch", "pack")
NAMES = TRAIN_NAMES + HELDOUT_NAMES

_APPLY: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}
_WORDS: Mapping[str, tuple[str, str, str]] = {
    "+": ("sum", "total", "addition"),
    "-": ("difference", "gap", "subtraction"),
    "*": ("product", "multiple", "multiplication"),
    "//": ("quotient", "ratio", "division"),
    "%": ("remainder", "modulus", "residue"),
}
_TEMPLATES = (
    "# return the {word} of {a} and {b}",
    "# of {a} and {b} return the {word}",
)
_ARGUMENTS = (("x", "y"), ("a", "b"), ("m", "n"))
_DEFINITION = "def {name} ( {a} , {b} ) : return {a} {operator} {b}"
_INPUTS = ((7, 2), (9, 4), (17, 5), (-8, 3))
"""On each of them no two operators agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """One task's file: what it does, what it should do, and how the specification says so."""

    name: str
    correct: str
    buggy: str
    specification: str
    arguments: tuple[str, str]

    @property
    def issue(self) -> str:
        """What the agent is told; the same for all operators of a name."""
        return f"fix {self.name}"

    def source(self, operator: str) -> str:
        """The file with an operator in place: two lines of Python."""
        a, b = self.arguments
        line = _DEFINITION.format(name=self.name, a=a, b=b, operator=operator)
        return f"{self.specification}\n{line}\n"

    @property
    def cases(self) -> tuple[Case, ...]:
        """Calls that tell all five operators apart."""
        return tuple(Case(arguments=xy, expected=_APPLY[self.correct](*xy)) for xy in _INPUTS)


def bugs() -> dict[Task, Bug]:
    """All 30 tasks in their fixed order: by name, then by correct operator."""
    return {
        Task(
            id=f"bugfix/{name}/{index}", split="train" if name in TRAIN_NAMES else "heldout"
        ): _bug(name, index)
        for name in NAMES
        for index in range(len(OPERATORS))
    }


def vocabulary() -> tuple[str, ...]:
    """Every word that issues, files, observations and valid actions consist of, sorted."""
    texts = [text for bug in bugs().values() for text in (bug.issue, bug.source(bug.buggy))]
    texts += [READ, *(f"{PATCH} {operator}" for operator in OPERATORS), UNKNOWN_ACTION]
    return tuple(sorted({word for text in texts for word in text.split()}))


READ = "read"
PATCH = "patch"
UNKNOWN_ACTION = "error : unknown action"


def _bug(name: str, index: int) -> Bug:
    """Rendering by fixed strides, so that each word, template and pair occurs in training."""
    n = NAMES.index(name)
    correct = OPERATORS[index]
    a, b = _ARGUMENTS[(n + 2 * index) % 3]
    word = _WORDS[correct][(n + index) % 3]
    shift = 1 + n % 4
    return Bug(
        name=name,
        correct=correct,
        buggy=OPERATORS[(index + shift) % len(OPERATORS)],
        specification=_TEMPLATES[(n // 2 + index) % 2].format(word=word, a=a, b=b),
        arguments=(a, b),
    )
