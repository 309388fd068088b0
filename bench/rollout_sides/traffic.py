"""What is sampled: the same prompts for every side."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from trueup.models.chat import Renderer

_QUESTIONS = (
    "What is {a} + {b}?",
    "Tell me something about the number {a}.",
    "A farmer has {a} sheep and buys {b} more. How many are there now?",
    "Write a Python function that adds {a} to its argument and explain every line of it.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests that arrive together."""

    name: str
    prompts: Sequence[list[int]]
    samples: int = 1
    """Of every prompt."""
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    """Empty: every sample has `max_tokens`."""
    slots: int
    """Most samples at a time."""

    def requests(self) -> Iterator[list[int]]:
        """A prompt per sample, those of a group together."""
        for prompt in self.prompts:
            for _ in range(self.samples):
                yield prompt


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a side did with it."""

    tokens: int
    """Sampled, each with its log-prob."""
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second, prefill included."""
        return self.tokens / self.seconds


class Side(Protocol):
    """Something that samples."""

    def run(self, traffic: Traffic) -> Outcome:
        """Sample all of it."""
        ...


def prompts(renderer: Renderer, n: int) -> list[list[int]]:
    """Rendered questions of four lengths, all different."""
    draw = random.Random(0)
    return [
        list(renderer.start(_QUESTIONS[i % 4].format(a=1000 + i, b=draw.randint(10, 99))))
        for i in range(n)
    ]
