"""Worlds and dialogues that say what they are told to, for tests of the rollout."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trueup.environments.base import Step
from trueup.training.messages import EpisodeSpec
from trueup.types import Task

STOP = 0


class NumberDialogue:
    """Text is numbers, and each number is its own token id."""

    stop_ids = (STOP,)

    def start(self, text: str) -> array[int]:
        return _ids(text)

    def observe(self, text: str) -> array[int]:
        return _ids(text)

    def action_text(self, ids: array[int]) -> str:
        return " ".join(map(str, ids))


@dataclass
class FakeWorld:
    """Answers the n-th action with the n-th step; raises what is an exception."""

    steps: Sequence[Step | Exception] = ()
    verdict: float | Exception = 0.25
    """Of an episode that ran out of turns or tokens."""
    text: str | Exception = "11 12"
    sandbox: str = "fake"
    before_step: Callable[[], Any] = lambda: None
    calls: list[tuple[str, str]] = field(default_factory=list)

    async def start(self) -> str:
        self.calls.append(("start", ""))
        return _value(self.text)

    async def step(self, action: str) -> Step:
        taken = sum(name == "step" for name, _ in self.calls)
        self.calls.append(("step", action))
        if waiting := self.before_step():
            await waiting
        return _value(self.steps[taken])

    async def finish(self) -> float:
        self.calls.append(("finish", ""))
        return _value(self.verdict)

    async def close(self) -> None:
        self.calls.append(("close", ""))


def spec(name: str = "e", **changes: Any) -> EpisodeSpec:
    """One attempt to run."""
    values: dict[str, Any] = {
        "task": Task(id="t", split="train"),
        "group": 3,
        "member": 1,
        "attempt": 0,
        "engine": 0,
        "key": (7, 3, 0, 1, 0),
        "temperature": 1.0,
        "store": True,
        **changes,
    }
    return EpisodeSpec(id=name, **values)


def _ids(text: str) -> array[int]:
    return array("i", map(int, text.split()))


def _value(item: Any) -> Any:
    if isinstance(item, Exception):
        raise item
    return item
