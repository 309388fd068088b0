"""The ledger's rows as a history: attempts with their ends, groups, lives, versions, steps.

Nothing here judges: `lifecycle`, `versions` and `table` do. A *life* of a run is what lies between
two `resume` rows; an attempt never outlives its life.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from trueup.records.schema import Event
from trueup.scheduling import Rules, rules_from_dict

KINDS = (
    *("run_start", "issue", "finish", "close", "claim", "drop", "commit", "skip", "publish"),
    *("apply", "probe", "resume", "run_end"),
)
"""Kinds of rows that the audit reads."""

SpanKey = tuple[int, str, int]
"""Version, engine, epoch."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One attempt: when it was issued, how it ended, what became of it."""

    issue: Event
    life: int
    ends_at: float
    """`seq` of the `resume` that ended its life; infinite if none did."""
    finish: Event | None = None
    close: Event | None = None
    """Of its group."""
    claims: list[Event] = field(default_factory=list)
    drops: list[Event] = field(default_factory=list)
    """Within its life."""

    @property
    def id(self) -> str:
        """The episode's id."""
        return self.issue.episode

    @property
    def group(self) -> tuple[int, int]:
        """(life, group): a resumed run may count its groups anew."""
        return (self.life, self.issue.group)

    @property
    def member(self) -> int:
        """Index within the group."""
        return int(self.issue.payload["member"])

    @property
    def for_training(self) -> bool:
        """Not an evaluation."""
        return bool(self.issue.payload["split"] != "heldout")

    @property
    def ok(self) -> bool:
        """Finished, and neither infrastructure failed nor was it withdrawn."""
        return self.finish is not None and succeeded(self.finish)

    @property
    def late(self) -> bool:
        """Finished after its group had closed without it."""
        return bool(self.finish and self.close and self.finish.seq > self.close.seq)


class History:
    """What happened, indexed.

    Args:
        events: Rows of the kinds in `KINDS`, in order, of the right shape (`shape.malformed`), the
            first of them `run_start`; may be empty.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self.events: dict[str, list[Event]] = {kind: [] for kind in KINDS}
        for event in events:
            self.events[event.kind].append(event)
        starts = [*self.events["run_start"], *self.events["resume"]]
        starts.sort(key=lambda event: event.seq)
        self._starts = [event.seq for event in starts]
        self._rules = [rules_from_dict(event.payload["schedule"]) for event in starts]
        self._resumes = [event.seq for event in self.events["resume"]]
        self._index_versions()
        self.attempts: dict[str, Attempt] = {}
        self.groups: dict[tuple[int, int], list[Attempt]] = defaultdict(list)
        self.closes: dict[tuple[int, int], list[Event]] = defaultdict(list)
        self._index_attempts()

    def life(self, seq: int) -> int:
        """0 for rows before the first resume, 1 for those of the first resume on, ..."""
        return bisect_right(self._resumes, seq)

    def version_at(self, seq: float) -> int:
        """The trainer's version just before a row, as the last commit, skip or resume left it."""
        return self._versions[bisect_left(self._changes, seq)]

    def step_at(self, seq: float) -> int:
        """The step that is due at a row: one more than the last that was committed or skipped."""
        return self._next_steps[bisect_left(self._changes, seq)]

    def rules_at(self, seq: int) -> Rules:
        """The Scheduler's parameters: a resumed run may have been given others."""
        return self._rules[max(bisect_right(self._starts, seq) - 1, 0)]

    def bumps_between(self, start: float, stop: float) -> int:
        """Commits with start < seq < stop."""
        return bisect_left(self._commits, stop) - bisect_right(self._commits, start)

    def claims_of(self, step: Event) -> list[Event]:
        """Claims for a step that was committed or skipped, in the same life and before it."""
        claims = self._claims[self.life(step.seq), step.payload["step"]]
        return [event for event in claims if event.seq < step.seq]

    def refunds(self) -> Iterator[Event]:
        """Rows by which admitted work left without being trained."""
        yield from [*self.events["drop"], *self.events["skip"]]
        yield from (event for event in self.events["finish"] if not succeeded(event))
        for event in self.events["close"]:
            if event.payload.get("reason") != "complete":
                yield event

    def _index_versions(self) -> None:
        kinds = ("commit", "skip", "resume")
        changes = [event for kind in kinds for event in self.events[kind]]
        changes.sort(key=lambda event: event.seq)
        rules = self._rules[0] if self._rules else None
        first, due = (rules.first_version, rules.first_step) if rules else (0, 0)
        self._commits = [event.seq for event in self.events["commit"]]
        self._changes: list[float] = [event.seq for event in changes]
        self._versions = [first, *(event.version for event in changes)]
        self._next_steps: list[int] = [due]
        self.steps: dict[int, Event] = {}
        """Surviving commits and skips by step: a resume at step s undoes those from s on."""
        self.unfounded: list[Event] = []
        """Resumes from a step that had not been done, or was undone, or had another version."""
        for event in changes:
            step = event.payload["step"]
            if event.kind != "resume":
                self.steps[step] = event
                self._next_steps.append(step + 1)
                continue
            done = self.steps[step - 1].version if step - 1 in self.steps else None
            if event.version != done and (step, event.version) != (due, first):
                self.unfounded.append(event)
            self.steps = {s: event for s, event in self.steps.items() if s < step}
            self._next_steps.append(step)

    def _index_attempts(self) -> None:
        for event in self.events["issue"]:
            life = self.life(event.seq)
            ends_at = self._resumes[life] if life < len(self._resumes) else math.inf
            attempt = Attempt(issue=event, life=life, ends_at=ends_at)
            self.attempts.setdefault(event.episode, attempt)
            self.groups[attempt.group].append(attempt)
        for event in self.events["close"]:
            key = (self.life(event.seq), event.group)
            self.closes[key].append(event)
            for attempt in self.groups.get(key, ()):
                attempt.close = attempt.close or event
        for event in self.events["finish"]:
            known = self.attempts.get(event.episode)
            if known and known.finish is None:
                known.finish = event
        self._claims: dict[tuple[int, int], list[Event]] = defaultdict(list)
        for event in self.events["claim"]:
            self._claims[self.life(event.seq), event.payload["step"]].append(event)
            for known in self._named(event):
                known.claims.append(event)
        for event in self.events["drop"]:
            for known in self._named(event):
                if self.life(event.seq) == known.life:
                    known.drops.append(event)

    def _named(self, event: Event) -> Iterator[Attempt]:
        for episode in event.payload["episodes"]:
            if episode in self.attempts:
                yield self.attempts[episode]


def succeeded(finish: Event) -> bool:
    """Whether a finished attempt is the agent's own doing, which trains."""
    return finish.payload["status"] not in ("failed", "aborted")


def merged(spans: Iterable[tuple[SpanKey, int]]) -> list[tuple[SpanKey, int]]:
    """Spans with neighbours of equal provenance joined; the second element counts tokens."""
    joined: list[tuple[SpanKey, int]] = []
    for key, tokens in spans:
        if joined and joined[-1][0] == key:
            joined[-1] = (key, joined[-1][1] + tokens)
        elif tokens:
            joined.append((key, tokens))
    return joined


def spans_of(finish: Event) -> list[tuple[SpanKey, int]]:
    """Provenance that a `finish` row records."""
    return [
        ((version, engine, epoch), tokens)
        for version, engine, epoch, tokens in finish.payload["spans"]
    ]
