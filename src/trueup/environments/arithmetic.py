"""Sums, differences and products of small integers, asked in words and graded by a number.

One turn: the agent is shown solved problems and an open one, and its answer ends the episode.
Nothing that it says is executed or evaluated: the grader reads a number off the text
(`arithmetic_grading`). Which problems exist is in `arithmetic_problems`.
"""

from __future__ import annotations

from collections.abc import Sequence

from trueup.config import Config
from trueup.environments.arithmetic_grading import grade
from trueup.environments.arithmetic_problems import Problem, problems
from trueup.environments.base import Step
from trueup.environments.sandbox.base import Sandbox
from trueup.errors import ConfigError
from trueup.types import Task

ANSWER = "answer"
"""The only tool: saying something."""


class ArithmeticEnvironment:
    """Problems of one level; see `arithmetic_problems`.

    Args:
        level: How hard they are, a key of `LEVELS`.

    Raises:
        ConfigError: There is no such level.
    """

    name = "arithmetic"

    def __init__(self, *, level: int) -> None:
        self._problems = problems(level)

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of `train` or `heldout`, by index.

        Raises:
            ConfigError: There is no such split.
        """
        if split not in ("train", "heldout"):
            raise ConfigError(field="split", rule="train or heldout", value=split)
        return tuple(task for task in self._problems if task.split == split)

    def vocabulary(self) -> tuple[str, ...]:
        """Empty: any text may occur."""
        return ()

    def make(self, task: Task, *, seed: int) -> ArithmeticEnv:
        """A fresh attempt; a task reads the same for every seed."""
        return ArithmeticEnv(self.problem(task))

    def problem(self, task: Task) -> Problem:
        """What a task asks.

        Raises:
            ConfigError: The task is of another environment or level.
        """
        if task not in self._problems:
            raise ConfigError(field="task", rule="one of this environment's", value=task)
        return self._problems[task]

    def close(self) -> None:
        """Nothing to free."""


class ArithmeticEnv:
    """One attempt."""

    sandbox = "none"
    """No code is run, so nothing isolates it."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._state = "new"

    def start(self) -> str:
        """The problem, with its solved examples."""
        self._expect("new")
        self._state = "started"
        return self._problem.prompt

    def step(self, action: str) -> Step:
        """Answer; every answer ends the episode."""
        self._expect("started")
        self._state = "done"
        verdict = grade(action, self._problem.answer)
        return Step(
            observation="",
            done=True,
            reward=verdict.reward,
            tool=ANSWER,
            counters={"right": int(verdict.right), "in_format": int(verdict.in_format)},
        )

    def finish(self) -> float:
        """0: an answer that was cut is none."""
        self._expect("started")
        self._state = "done"
        return 0.0

    def close(self) -> None:
        """Nothing to free; no calls after it."""
        self._state = "closed"

    def _expect(self, state: str) -> None:
        if self._state != state:
            raise RuntimeError(f"an attempt must be {state} for this call, is {self._state}")


def build(config: Config, sandbox: Sandbox) -> ArithmeticEnvironment:
    """The environment that a configuration describes; it runs no code and leaves the sandbox be."""
    return ArithmeticEnvironment(level=config.environment.level)
