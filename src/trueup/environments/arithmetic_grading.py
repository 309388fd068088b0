"""Verdicts on an arithmetic answer: a number read off a text, nothing executed or evaluated.

The answer is the last number of the text, if it is an integer of at most twelve ASCII digits; it is
in the stated format if the text ends with it, white space and a full stop aside.

    right  in format   reward
    yes    yes         1
    yes    no          1 - FORMAT
    no     yes         FORMAT
    no     no          0
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FORMAT = 0.1
"""Part of the reward that the format earns by itself."""

_NUMBER = re.compile(r"-?[0-9]+(?:[.,][0-9]+)*")
_INTEGER = re.compile(r"-?[0-9]{1,12}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What an answer is worth."""

    right: bool
    in_format: bool

    @property
    def reward(self) -> float:
        """In [0, 1]; 1 only for what is right and in format."""
        return (1.0 - FORMAT) * self.right + FORMAT * self.in_format


def grade(text: str, answer: int) -> Verdict:
    """Judge any text.

    Example: for 7, `3 + 4 = 7.` is right and in format, `7, of course` right, `12` in format, and
    `7.5` neither.

    Args:
        text: What the agent said.
        answer: The right number.
    """
    numbers = list(_NUMBER.finditer(text))
    if not numbers or not _INTEGER.fullmatch(numbers[-1][0]):
        return Verdict(right=False, in_format=False)
    rest = text[numbers[-1].end() :].strip()
    return Verdict(right=int(numbers[-1][0]) == answer, in_format=rest in ("", "."))
