"""Write the records of a run that never happened: the real Scheduler, everything else made up.

Time is virtual, an engine samples one token per second, and ledger and episode table are written
in the order in which a controller would. A `twist` may change, repeat or withhold rows before they
are chained, so that a planted fault leaves the chain intact and only its own invariant can find it.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
from array import array
from dataclasses import dataclass, field, replace

from trueup.records.directory import RunDirectory
from trueup.records.ledger import Ledger
from trueup.records.tokens import EpisodeRow, write_step
from trueup.scheduling import (
    AbortEpisode,
    CloseGroup,
    DropGroup,
    EpisodeFinished,
    GroupTimedOut,
    Rules,
    Scheduler,
    StartEpisode,
    StartGroup,
    StartSync,
    StartTraining,
    SyncFinished,
    TrainingFinished,
    rules_as_dict,
)
from trueup.types import Episode, EpisodeStatus, Failure, FailureKind, Segment, Span

ENGINE = "engine-{}"


class Killed(Exception):
    """The controller got SIGKILL."""


@dataclass
class Twist:
    """Plants a fault."""

    row: object = None
    """row(kind, columns) -> list of columns to append instead."""
    table: object = None
    """table(step, rows) -> rows to write instead."""


@dataclass
class Story:
    """What happens in the made-up run."""

    rules: Rules
    seed: int = 0
    steps: int = 5
    fail: float = 0.0
    """Chance that an attempt fails."""
    timeout: float = 1e9
    """Age in seconds at which a group is timed out."""
    tail: float = 1.0
    """Spread of the durations."""
    segments: int = 1
    kill_after: tuple[int, ...] = ()
    """Rows after which each life but the last is killed."""
    skipped: tuple[int, ...] = ()
    """Steps that learn nothing."""
    twist: Twist = field(default_factory=Twist)


def record(root, story):
    """Write a whole run, resumed as often as it is killed; return its directory."""
    directory = RunDirectory.create(root, "run")
    Ledger.create(directory.ledger).close()
    checkpoint = (0, 0)
    for life in range(len(story.kill_after) + 1):
        controller = _Controller(directory, story, life, checkpoint)
        with contextlib.suppress(Killed):
            controller.run()
        controller.book.close()
        checkpoint = controller.checkpoint
    return directory


class _Controller:
    def __init__(self, directory, story, life, checkpoint):
        self.directory, self.story, self.life, self.checkpoint = directory, story, life, checkpoint
        self.book = Ledger.open(directory.ledger)
        kills = story.kill_after[life : life + 1]
        self.rows_left = kills[0] if kills else 10**9
        self.step, self.version = checkpoint
        self.rules = replace(
            story.rules, steps=story.steps, first_version=self.version, first_step=self.step
        )
        self.scheduler = Scheduler(self.rules)
        self.random = random.Random(story.seed * 10 + life)
        self.now, self.order = 0.0, itertools.count()
        self.timers, self.running = [], {}
        self.served = [[(0.0, self.version)] for _ in story.rules.slots]
        self.done, self.closed, self.pending = {}, {}, []

    def put(self, kind, **columns):
        columns = {"actor": "controller", "t_mono": self.now, **columns}
        twist = self.story.twist.row
        for row in [columns] if twist is None else twist(kind, columns):
            if self.rows_left == 0:
                raise Killed
            self.rows_left -= 1
            self.book.append(kind, **row)

    def at(self, delay, event):
        heapq.heappush(self.timers, (self.now + delay, next(self.order), event))

    def run(self):
        schedule = rules_as_dict(self.rules)
        if self.life:
            payload = {"step": self.step, "path": "", "skipped": [], "schedule": schedule}
            self.put("resume", version=self.version, payload=payload)
            self.bury()
        else:
            self.put("run_start", payload={"schedule": schedule, "config_digest": "c"})
        self.publish(self.version)
        for engine in range(len(self.served)):
            self.apply(engine, self.version)
        self.act()
        while self.step < self.story.steps:
            self.now, _, event = heapq.heappop(self.timers)
            self.note(event)
        for key in list(self.running):
            self.finish(key, EpisodeStatus.ABORTED)
        for group, (_, ids) in self.closed.items():
            self.drop(group, "run_end", ids)
        self.put("run_end", version=self.version, payload={"reason": "done", "message": ""})

    def bury(self):
        """Say what became of what the life before left behind."""
        issued, closed = {}, {}
        for event in self.book.events():
            match event.kind:
                case "issue" if event.payload["split"] == "train":
                    issued[event.episode] = event
                case "finish":
                    issued.pop(event.episode, None)
                case "close":
                    closed[event.group] = event
                case "claim" | "drop":
                    closed.pop(event.group, None)
        for event in issued.values():
            columns = {"episode": event.episode, "attempt": event.attempt, "group": event.group}
            payload = {"status": "aborted", "reward": None, "action_tokens": 0, "spans": []}
            self.put("finish", **columns, payload=payload)
        for event in closed.values():
            self.drop(event.group, "resume", event.payload["survivors"], rows=False)

    # ---- what happens

    def note(self, event):
        match event:
            case EpisodeFinished(group, member, attempt, ok):
                key = (group, member, attempt)
                if key not in self.running:
                    return
                spans = self.finish(key, EpisodeStatus.DONE if ok else EpisodeStatus.FAILED)
                oldest = min(span.version for span in spans) if ok else -1
                event = EpisodeFinished(group, member, attempt, ok, oldest, event.reward)
            case TrainingFinished():
                self.train()
            case SyncFinished(engine, version):
                self.served[engine].append((self.now, version))
                self.apply(engine, version)
        self.act(event)

    def act(self, *events):
        aborted = []
        for action in self.scheduler.advance(*events):
            match action:
                case StartGroup(group):
                    self.at(self.story.timeout, GroupTimedOut(group))
                case StartEpisode():
                    self.start(action)
                case AbortEpisode(group, member, attempt):
                    aborted.append((group, member, attempt))
                case CloseGroup(group, reason, members):
                    ids = [self.done[group, member] for member in members]
                    self.closed[group] = (reason, ids)
                    payload = {"reason": reason, "survivors": ids, "task": "t", "stream": 0}
                    self.put("close", group=group, payload=payload)
                case DropGroup(group, reason):
                    self.drop(group, reason, self.closed.pop(group)[1])
                case StartTraining(version, groups):
                    self.batch = []
                    for group in groups:
                        ids = self.closed.pop(group)[1]
                        self.batch += ids
                        payload = {"step": self.step, "episodes": ids}
                        self.put("claim", group=group, version=version, payload=payload)
                    learned = self.step not in self.story.skipped
                    self.at(3.0, TrainingFinished(version + learned))
                case StartSync(engine, version):
                    self.at(0.5, SyncFinished(engine, version))
        for key in aborted:
            self.finish(key, EpisodeStatus.ABORTED)
            self.act(EpisodeFinished(*key, False))

    def start(self, action):
        key = (action.group, action.member, action.attempt)
        engine = ENGINE.format(action.engine)
        self.running[key] = (self.now, action.engine)
        ok = self.random.random() >= self.story.fail
        reward = float(self.random.random() < 0.5)
        duration = 1 + self.random.lognormvariate(1.5, self.story.tail)
        self.at(duration, EpisodeFinished(*key, ok, -1, reward))
        self.put(
            "issue",
            **self.columns(key),
            version=self.version,
            engine=engine,
            payload={"task": "t", "member": action.member, "slot": action.slot, "split": "train"},
        )

    def columns(self, key):
        group, _, attempt = key
        return {"episode": self.name(key), "attempt": attempt, "group": group}

    def name(self, key):
        return "l{}-g{}-m{}-a{}".format(self.life, *key)

    def finish(self, key, status):
        start, engine = self.running.pop(key)
        ok = status is EpisodeStatus.DONE
        spans = self.spans(engine, start) if ok else ()
        reward = float(self.random.random() < 0.5) if ok else None
        failure = None
        if status is EpisodeStatus.FAILED:
            failure = Failure(kind=FailureKind.ENVIRONMENT, reason="worker_lost")
        group, member, attempt = key
        episode = Episode(
            id=self.name(key),
            task="t",
            group=group,
            member=member,
            attempt=attempt,
            segments=tuple(self.segments(spans)) if ok else (),
            turns=(),
            status=status,
            reward=reward,
            failure=failure,
        )
        if ok:
            self.done[group, member] = episode.id
        self.done[episode.id] = episode
        if not ok:
            self.pending.append(EpisodeRow(episode=episode, reason=str(status)))
        n = sum(span.stop - span.start for span in spans)
        payload = {
            "status": str(status),
            "reward": reward,
            "failure": failure and {"kind": "environment", "reason": failure.reason},
            "tokens": n + 2,
            "action_tokens": n,
            "turns": 0,
            "counters": {},
            "spans": [[s.version, s.engine, s.epoch, s.stop - s.start] for s in spans],
            "t_submit": start,
            "t_start": start,
            "t_end": self.now,
        }
        self.put("finish", **self.columns(key), payload=payload)
        return spans

    def spans(self, engine, start):
        """One token per second from `start` to now, of the version served at that moment."""
        versions = [
            [version for t, version in self.served[engine] if t <= start + second][-1]
            for second in range(max(1, int(self.now - start)))
        ]
        spans, position = [], 0
        for version, tokens in itertools.groupby(versions):
            n = len(list(tokens))
            spans.append(
                Span(
                    start=position,
                    stop=position + n,
                    version=version,
                    engine=ENGINE.format(engine),
                    epoch=self.life,
                    precision="float32",
                )
            )
            position += n
        return tuple(spans)

    def segments(self, spans):
        """Spans laid out over the story's number of segments."""
        parts = [spans[i :: self.story.segments] for i in range(self.story.segments)]
        ordered, rest = [], list(spans)
        for part in parts:
            ordered.append(rest[: len(part)])
            rest = rest[len(part) :]
        for mine in ordered:
            offset = mine[0].start if mine else 0
            shifted = tuple(_shift(span, -offset) for span in mine)
            n = sum(span.stop - span.start for span in mine)
            yield Segment(
                token_ids=array("i", range(n + 2)),
                action=array("b", [0, 0] + [1] * n),
                turn=array("i", [0] * (n + 2)),
                logp_behaviour=array("f", [-0.5] * n),
                spans=shifted,
            )

    def drop(self, group, reason, ids, *, rows=True):
        payload = {"reason": reason, "episodes": ids}
        self.put("drop", group=group, version=self.version, payload=payload)
        if rows:
            self.pending += [EpisodeRow(episode=self.done[name], reason=reason) for name in ids]

    def train(self):
        step, bound = self.step, self.version - self.rules.bound
        rows = [self.row(self.done[name], bound) for name in self.batch] + self.pending
        self.pending = []
        twist = self.story.twist.table
        write_step(self.directory, step, rows if twist is None else twist(step, rows))
        payload = {"step": step, "t0": self.now - 3, "t1": self.now, "phases": {}}
        self.put("train", actor="trainer", version=self.version, payload=payload)
        kind = "skip" if step in self.story.skipped else "commit"
        if kind == "commit":
            self.version += 1
            self.publish(self.version)
        payload = {"step": step, "episodes": self.batch}
        self.put(kind, version=self.version, payload=payload)
        self.step += 1
        if self.step % 2 == 0:
            payload = {"step": self.step, "digest": "d", "path": ""}
            self.put("checkpoint", version=self.version, payload=payload)
            self.checkpoint = (self.step, self.version)

    def row(self, episode, bound):
        keep = [
            self.rules.consume != "mask" or span.version >= bound
            for segment in episode.segments
            for span in segment.spans
            for _ in range(span.stop - span.start)
        ]
        return EpisodeRow(episode=episode, keep=keep)

    def publish(self, version):
        payload = {"digest": self.digest(version), "nbytes": 8, "n_changed": 1, "t0": 0, "t1": 0}
        self.put("publish", actor="trainer", version=version, payload=payload)

    def apply(self, engine, version):
        name = ENGINE.format(engine)
        payload = {"epoch": self.life, "digest": self.digest(version), "tokens_recomputed": 0}
        self.put("apply", actor=name, engine=name, version=version, payload=payload)

    def digest(self, version):
        return f"life {self.life} version {version}"


def _shift(span, by):
    values = {name: getattr(span, name) for name in Span.__slots__}
    return Span(**{**values, "start": span.start + by, "stop": span.stop + by})
