"""What the events of a run add up to: attempts, and the steps that survived.

A resume rolls the trainer back to a checkpoint: the steps after it are void, and what they consumed
counts no more. Monotonic times compare within one session only (a resumed run
may have another clock), so time is added up session by session.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from trueup.records.schema import Event

STARTS = ("run_start", "resume")


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One attempt at one task, from issue to finish; unfinished where the run was killed."""

    episode: str
    group: int
    member: int
    attempt: int
    version: int
    engine: str
    slot: int
    task: str
    split: str
    session: int
    t_issue: float
    finish: dict[str, Any] | None = None
    t_finish: float | None = None

    @property
    def reward(self) -> float | None:
        """The verdict; None where there is none."""
        return None if self.finish is None else self.finish.get("reward")

    @property
    def spans(self) -> list[tuple[int, str, int, int]]:
        """(version, engine, epoch, action tokens) in order."""
        found = () if self.finish is None else self.finish.get("spans", ())
        return [(int(v), str(e), int(k), int(n)) for v, e, k, n in found]


@dataclass(slots=True, kw_only=True)
class Step:
    """A step batch that was consumed and not rolled back."""

    step: int
    version: int
    """Trainer's version when the step started."""
    consumed: list[Attempt]
    """Episodes of its groups."""
    arrived: list[Attempt]
    """Those, and the ones refunded for lack of contrast since the step before."""
    train: dict[str, Any]
    """step, t0, t1, phases."""
    session: int
    trained: list[Attempt] = field(default_factory=list)
    """Episodes of the commit; none if the batch had no contrast, or the run died before it."""

    @property
    def t_end(self) -> float:
        """End of training, on the session's monotonic clock."""
        return float(self.train["t1"])


@dataclass(slots=True, kw_only=True)
class History:
    """Attempts in order of issue, steps in order of version, events by session."""

    attempts: list[Attempt] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    sessions: list[list[Event]] = field(default_factory=list)

    def events(self, *kinds: str) -> Iterator[Event]:
        """All events of some kinds, in order."""
        return (e for session in self.sessions for e in session if e.kind in kinds)


def read(events: Iterable[Event]) -> History:
    """Follow a run from its first event to its last, in one pass."""
    reader = _Reader()
    for event in events:
        reader.take(event)
    return reader.history


class _Reader:
    """State of the pass: what was claimed, and refunded, since the last step."""

    def __init__(self) -> None:
        self.history = History()
        self._latest: dict[str, Attempt] = {}
        self._claims: dict[int, list[Event]] = {}
        self._refunded: list[str] = []

    def take(self, event: Event) -> None:
        sessions = self.history.sessions
        if not sessions or (
            event.kind in STARTS and any(e.kind not in STARTS for e in sessions[-1])
        ):
            sessions.append([])
        sessions[-1].append(event)
        handler = getattr(self, f"_on_{event.kind}", None)
        if handler is not None:
            handler(event)

    def _on_issue(self, event: Event) -> None:
        payload = event.payload
        attempt = Attempt(
            episode=event.episode,
            group=event.group,
            member=int(payload.get("member", -1)),
            attempt=event.attempt,
            version=event.version,
            engine=event.engine,
            slot=int(payload.get("slot", -1)),
            task=str(payload.get("task", "")),
            split=str(payload.get("split", "train")),
            session=len(self.history.sessions) - 1,
            t_issue=event.t_mono,
        )
        self.history.attempts.append(attempt)
        self._latest[event.episode] = attempt

    def _on_finish(self, event: Event) -> None:
        attempt = self._latest.get(event.episode)
        if attempt is not None:
            attempt.finish, attempt.t_finish = event.payload, event.t_mono

    def _on_claim(self, event: Event) -> None:
        self._claims.setdefault(int(event.payload["step"]), []).append(event)

    def _on_drop(self, event: Event) -> None:
        if event.payload["reason"] == "zero_variance":
            self._refunded += event.payload["episodes"]

    def _on_train(self, event: Event) -> None:
        step = int(event.payload["step"])
        claims = self._claims.pop(step, [])
        consumed = self._attempts(e for claim in claims for e in claim.payload["episodes"])
        self.history.steps.append(
            Step(
                step=step,
                version=claims[0].version if claims else event.version,
                consumed=consumed,
                arrived=consumed + self._attempts(self._refunded),
                train=event.payload,
                session=len(self.history.sessions) - 1,
            )
        )
        self._refunded = []

    def _on_commit(self, event: Event) -> None:
        for step in self.history.steps[-1:]:
            if step.step == event.payload["step"]:
                step.trained = self._attempts(event.payload["episodes"])

    def _on_resume(self, event: Event) -> None:
        done = int(event.payload["step"])
        self.history.steps = [s for s in self.history.steps if s.step < done]
        self._claims.clear()
        self._refunded = []

    def _attempts(self, episodes: Iterable[str]) -> list[Attempt]:
        return [self._latest[e] for e in dict.fromkeys(episodes) if e in self._latest]


def lags(step: Step) -> list[tuple[int, int]]:
    """(lag, action tokens) of every span that the step consumed."""
    return [
        (step.version - version, tokens)
        for attempt in step.consumed
        for version, _, _, tokens in attempt.spans
        if tokens
    ]
