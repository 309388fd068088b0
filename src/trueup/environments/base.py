"""One task's world, and the family of tasks it belongs to.

An `Env` is blocking, single-use and knows text only: rendering to token ids is the rollout's
business, concurrency and deadlines the worker's (`environments.worker`). Failures of infrastructure
are raised (`EnvironmentFault`, `GraderFault`) and become data at the rollout's boundary; they are
never a reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trueup.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one action led to."""

    observation: str
    """Text shown to the agent before its next turn; empty when done."""
    done: bool
    reward: float | None = None
    """Set when done, by a trusted verdict: a finite float."""
    tool: str = ""
    """What the environment did: `read`, `patch`, `invalid`, ..."""
    tool_s: float = 0.0
    """Seconds it took."""
    tool_status: str = "ok"
    """`ok`, `error` (the agent's own), `timeout`, `cached`."""
    counters: dict[str, int] = field(default_factory=dict)
    """Counts to add to the episode's, e.g. {"reads": 1}."""


class Env(Protocol):
    """One attempt at one task. Single use: start, step until done, close (idempotent)."""

    sandbox: str
    """Backend that isolates the code it runs: `bwrap`, ..., `none`."""

    def start(self) -> str:
        """The task's text, shown to the agent before its first turn."""
        ...

    def step(self, action: str) -> Step:
        """Act once.

        Raises:
            EnvironmentFault: A worker or sandbox failed.
            GraderFault: No trustworthy verdict could be had.
        """
        ...

    def finish(self) -> float:
        """Grade an episode that ran out of turns or tokens as it stands.

        Raises:
            GraderFault: No trustworthy verdict could be had.
        """
        ...

    def close(self) -> None:
        """Free what the attempt holds; may be called twice."""
        ...


class Environment(Protocol):
    """A family of tasks."""

    name: str

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of `train` or `heldout`, in a fixed order."""
        ...

    def vocabulary(self) -> tuple[str, ...]:
        """Every word that it says or accepts; empty where any text may occur."""
        ...

    def make(self, task: Task, *, seed: int) -> Env:
        """A fresh attempt at a task; equal seeds give equal worlds."""
        ...

    def close(self) -> None:
        """Free workers and sandboxes; may be called twice."""
        ...
