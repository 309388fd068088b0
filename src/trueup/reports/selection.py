"""Who was launched, finished, consumed and kept: a loop that loses the long or the hard shows here.

What an attempt will cost is unknown when it is launched, but its task is known: so difficulty (1 −
mean reward of the task over the run) is compared from the launch on, length, turns, duration and
reward of the graded from the finish on. A stage is compared with what it lost of the stage before.
What was still running or waiting when a run ended is not lost: it is later, of another policy.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trueup.errors import DataError
from trueup.records.directory import RunDirectory
from trueup.records.tokens import read_step
from trueup.reports.history import Attempt, History
from trueup.reports.markup import Markup, element
from trueup.reports.svg import number
from trueup.reports.tables import table

STAGES = ("launched", "finished", "consumed", "kept")
_NOT_LOST = ("run_end", "resume")
"""Reasons of a drop that say nothing about the episode."""
ALARM = 4.0
"""Standard errors from which a difference to the stage before is marked."""


FEWEST = 8
"""Episodes that a mean needs on either side to be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A property of the episodes of one stage."""

    mean: float | None
    """None where no episode has it, or not every one yet."""
    z: float | None
    """Of the difference to the episodes that this stage lost; None where these are few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The episodes that came so far."""

    name: str
    episodes: int
    difficulty: Quantity
    tokens: Quantity
    turns: Quantity
    seconds: Quantity
    reward: Quantity


_QUANTITIES = ("difficulty", "tokens", "turns", "seconds", "reward")


def selection(run_dir: Path, history: History) -> list[Stage]:
    """The stages of a run, those without any episode left out."""
    launched = [a for a in history.attempts if a.split == "train"]
    finished = [a for a in launched if a.reward is not None]
    consumed = [a for step in history.steps for a in step.consumed]
    kept = _kept(run_dir, history)
    hard = _difficulty(finished)
    dropped = {
        episode
        for event in history.events("drop")
        if event.payload["reason"] not in _NOT_LOST
        for episode in event.payload["episodes"]
    }

    def lost(attempt: Attempt) -> bool:
        failed = attempt.finish is not None and attempt.reward is None
        return failed or attempt.episode in dropped

    measures: dict[str, Callable[[Attempt], float | None]] = {
        "difficulty": lambda a: hard.get(a.task),
        "tokens": lambda a: _number(a, "action_tokens"),
        "turns": lambda a: _number(a, "turns"),
        "seconds": _seconds,
        "reward": lambda a: a.reward,
    }
    stages: list[Stage] = []
    before: Sequence[Attempt] = ()
    for name, attempts in zip(STAGES, (launched, finished, consumed, kept), strict=True):
        if not attempts:
            continue
        inside = {id(a) for a in attempts}
        gone = [a for a in before if id(a) not in inside and (name == "kept" or lost(a))]
        columns = {
            key: _compare(_values(attempts, measure), _values(gone, measure))
            if name != "launched" or key == "difficulty"
            else Quantity(mean=None, z=None)
            for key, measure in measures.items()
        }
        stages.append(Stage(name=name, episodes=len(attempts), **columns))
        before = attempts
    return stages


def selection_table(stages: Sequence[Stage]) -> Markup:
    """One row per stage; a difference that chance does not explain carries its standard errors."""
    if not stages:
        return element("p", "nothing was launched", class_="muted")
    rows = [
        (
            stage.name,
            number(stage.episodes),
            *(_cell(getattr(stage, name)) for name in _QUANTITIES),
        )
        for stage in stages
    ]
    return table(("episodes that were", "number", *_QUANTITIES), rows, words={0})


def _cell(quantity: Quantity) -> str:
    if quantity.mean is None:
        return "–"
    marked = quantity.z is not None and abs(quantity.z) >= ALARM
    return number(quantity.mean) + (f" ({quantity.z:+.0f} SE)" if marked else "")


def _kept(run_dir: Path, history: History) -> list[Attempt]:
    """Trained episodes with a token in the loss; an unreadable table keeps all of its step."""
    directory = RunDirectory(run_dir)
    found: list[Attempt] = []
    for step in history.steps:
        try:
            rows = read_step(directory, step.step, ["episode", "keep"]).to_pylist()
        except DataError:
            found += step.trained
            continue
        names = {row["episode"] for row in rows if row["keep"] is not None and any(row["keep"])}
        found += [a for a in step.trained if a.episode in names]
    return found


def _difficulty(finished: Iterable[Attempt]) -> dict[str, float]:
    rewards: dict[str, list[float]] = defaultdict(list)
    for attempt in finished:
        if attempt.reward is not None:
            rewards[attempt.task].append(attempt.reward)
    return {task: 1 - sum(r) / len(r) for task, r in rewards.items()}


def _number(attempt: Attempt, key: str) -> float | None:
    """A figure of a graded attempt; what failed has none, because it was cut off."""
    if attempt.finish is None or attempt.reward is None:
        return None
    value = attempt.finish.get(key)
    return None if value is None else float(value)


def _seconds(attempt: Attempt) -> float | None:
    start, end = _number(attempt, "t_start"), _number(attempt, "t_end")
    return None if start is None or end is None else end - start


def _values(attempts: Iterable[Attempt], measure: Callable[[Attempt], float | None]) -> list[float]:
    return [value for a in attempts if (value := measure(a)) is not None]


def _compare(inside: Sequence[float], outside: Sequence[float]) -> Quantity:
    """Mean of the selected, and z of its difference to the rejected (Welch)."""
    if not inside:
        return Quantity(mean=None, z=None)
    mean = sum(inside) / len(inside)
    if min(len(inside), len(outside)) < FEWEST:
        return Quantity(mean=mean, z=None)
    other = sum(outside) / len(outside)
    error = math.sqrt(_variance(inside, mean) + _variance(outside, other))
    return Quantity(mean=mean, z=(mean - other) / error if error else None)


def _variance(values: Sequence[float], mean: float) -> float:
    """Of the mean."""
    n = len(values)
    return sum((v - mean) ** 2 for v in values) / (n - 1) / n
