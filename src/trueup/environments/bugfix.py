"""Mend a one-line function: read the file, then patch its operator.

Which operator is right is only said in the file, in words, so an agent must read before it patches:
blind, it is right in one of five (`bugfix_source` shows why). Actions, one per turn:

    read        the file, as words
    patch OP    put OP into the file, run it in the sandbox, end with reward 1.0 or 0.0
    other       an error, and the episode goes on
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from trueup.config import Config
from trueup.environments.base import Step
from trueup.environments.bugfix_source import (
    OPERATORS,
    PATCH,
    READ,
    UNKNOWN_ACTION,
    Bug,
    bugs,
    vocabulary,
)
from trueup.environments.grading import checked_reward, grade
from trueup.environments.sandbox.base import Sandbox
from trueup.environments.verdicts import VerdictCache, verdict_key
from trueup.errors import ConfigError
from trueup.types import Task

__all__ = ["OPERATORS", "BugfixEnv", "BugfixEnvironment", "Demonstration", "build", "vocabulary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """All that a supervised demonstration of a task needs."""

    issue: str
    source: str
    """What `read` shows."""
    operator: str
    """The correct one."""


class BugfixEnvironment:
    """30 tasks, 20 of them for training; see `bugfix_source`.

    Args:
        sandbox: Where patched files run; owned from here on.
        deadline_s: Wall time in seconds of one grading run.
        verdict_cache: Whether equal files are graded once.
    """

    name = "bugfix"

    def __init__(self, sandbox: Sandbox, *, deadline_s: float, verdict_cache: bool = True) -> None:
        self.sandbox = sandbox
        self._deadline_s = deadline_s
        self._verdicts = VerdictCache(enabled=verdict_cache)
        self._bugs = bugs()

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of `train` or `heldout`, by name and then by operator.

        Raises:
            ConfigError: There is no such split.
        """
        if split not in ("train", "heldout"):
            raise ConfigError(field="split", rule="train or heldout", value=split)
        return tuple(task for task in self._bugs if task.split == split)

    def vocabulary(self) -> tuple[str, ...]:
        """Every word that it says or accepts."""
        return vocabulary()

    def actions(self) -> tuple[str, ...]:
        """Every patch that the agent can try."""
        return tuple(f"{PATCH} {operator}" for operator in OPERATORS)

    def make(self, task: Task, *, seed: int) -> BugfixEnv:
        """A fresh attempt; a task reads the same for every seed."""
        return BugfixEnv(self, self._bug(task))

    def demonstration(self, task: Task) -> Demonstration:
        """What an agent that knows the answer would see and choose."""
        bug = self._bug(task)
        return Demonstration(
            issue=bug.issue, source=_words(bug.source(bug.buggy)), operator=bug.correct
        )

    def solution(self, task: Task) -> str:
        """The action that earns reward 1."""
        return f"{PATCH} {self._bug(task).correct}"

    def verdict(self, bug: Bug, operator: str) -> tuple[float, bool]:
        """Reward of a file with an operator in place, and whether it was already known.

        Raises:
            EnvironmentFault: The sandbox could not be started.
            GraderFault: The run did not end in time.
        """
        source, cases = bug.source(operator), bug.cases
        key = verdict_key(source, bug.name, [(case.arguments, case.expected) for case in cases])

        def run() -> float:
            return checked_reward(
                grade(self.sandbox, source, bug.name, cases, deadline_s=self._deadline_s)
            )

        return self._verdicts.get(key, run)

    def close(self) -> None:
        """Close the sandbox."""
        self.sandbox.close()

    def _bug(self, task: Task) -> Bug:
        if task not in self._bugs:
            raise ConfigError(field="task", rule="one of this environment's", value=task)
        return self._bugs[task]


class BugfixEnv:
    """One attempt."""

    def __init__(self, environment: BugfixEnvironment, bug: Bug) -> None:
        self.sandbox = environment.sandbox.kind
        self._environment = environment
        self._bug = bug
        self._state = "new"

    def start(self) -> str:
        """The issue."""
        self._expect("new")
        self._state = "started"
        return self._bug.issue

    def step(self, action: str) -> Step:
        """Act once; see the module for the actions and `Env.step` for the faults."""
        self._expect("started")
        match action.split():
            case [verb] if verb == READ:
                return Step(
                    observation=_words(self._bug.source(self._bug.buggy)),
                    done=False,
                    tool=READ,
                    counters={"reads": 1},
                )
            case [verb, operator] if verb == PATCH and operator in OPERATORS:
                return self._patch(operator)
            case _:
                return Step(
                    observation=UNKNOWN_ACTION,
                    done=False,
                    tool="invalid",
                    tool_status="error",
                    counters={"invalid": 1},
                )

    def finish(self) -> float:
        """Grade the file as it stands, with its bug; see `Env.finish`."""
        self._expect("started")
        self._state = "done"
        reward, _ = self._environment.verdict(self._bug, self._bug.buggy)
        return reward

    def close(self) -> None:
        """Nothing to free; no calls after it."""
        self._state = "closed"

    def _patch(self, operator: str) -> Step:
        started = time.monotonic()
        reward, known = self._environment.verdict(self._bug, operator)
        self._state = "done"
        return Step(
            observation="",
            done=True,
            reward=reward,
            tool=PATCH,
            tool_s=time.monotonic() - started,
            tool_status="cached" if known else "ok",
            counters={"patches": 1, "verdict_cache_hits" if known else "sandbox_runs": 1},
        )

    def _expect(self, state: str) -> None:
        if self._state != state:
            raise RuntimeError(f"an attempt must be {state} for this call, is {self._state}")


def build(config: Config, sandbox: Sandbox) -> BugfixEnvironment:
    """The environment that a configuration describes."""
    return BugfixEnvironment(
        sandbox,
        deadline_s=config.environment.deadline_s,
        verdict_cache=config.environment.verdict_cache,
    )


def _words(text: str) -> str:
    return " ".join(text.split())
