"""A plausible asynchronous run in a directory, from a few lines of simulation.

Log-normal episodes on slots, one engine that swaps weights in flight, one trainer that takes groups
in the order of their start (so no lag exceeds the bound). Times are seconds, all chance is seeded.
"""

from __future__ import annotations

import heapq
import math
import random
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.run_writer import RunWriter
from trueup.diagnostics.metrics import Metric
from trueup.records.manifest import build_manifest, write_manifest
from trueup.records.tables import StepRow, VersionRow
from trueup.records.tokens import EpisodeRow, write_step
from trueup.types import Episode, EpisodeStatus, Segment, Span

ENGINE = "engine-0"
START = 1.0
PUBLISH_S = 0.06
WORDS = 60


def simulate(root: Path, *, name: str = "tiny-async", words: str = "", **settings: Any) -> Path:
    """Write a run directory.

    Args:
        root: Parent of the directory.
        name: Name of the run.
        words: Text of a `tokenizer.json` for its checkpoint; none if empty.
        settings: Fields of `Simulation`.
    """
    run = Simulation(root, name, **settings)
    path = run.go()
    if words:
        folder = run.out.directory.checkpoint(run.steps)
        folder.mkdir()
        (folder / "tokenizer.json").write_text(words)
    return path


@dataclass
class Member:
    """One episode."""

    group: int
    index: int
    slot: int
    t0: float
    t1: float
    reward: float = 0.0
    spans: list[list[Any]] = field(default_factory=list)

    @property
    def id(self) -> str:
        return f"g{self.group:06d}-{self.index:02d}-0"


@dataclass
class Simulation:
    """State of a simulated run; `go` writes it."""

    root: Path
    name: str
    steps: int = 24
    slots: int = 48
    groups: int = 6
    size: int = 8
    bound: int = 2
    seed: int = 0
    task: str = "repair-{}"
    ended: bool = True
    """False: killed during the last step, before its table was written."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.out = RunWriter(
            self.root,
            self.name,
            (
                f"schedule.staleness={self.bound}",
                f"train.steps={self.steps}",
                f"train.groups_per_step={self.groups}",
                f"engine.slots={self.slots}",
            ),
        )
        self.rows: list[tuple[float, str, dict[str, Any]]] = []
        self.served = [(0.0, 0)]  # since when the engine serves each version
        self.free = [(START, slot) for slot in range(self.slots)]
        self.issued: list[list[Member]] = []
        self.step_ends: list[float] = []

    def go(self) -> Path:
        """Run and write everything."""
        manifest = build_manifest(seeds={"run": self.seed}, command=["simulate"])
        write_manifest(self.out.directory.manifest, manifest)
        self.note(0.0, "run_start", schedule={})
        self.evaluate(START, step=0, passed=12, reads=0.21)
        self.fail_once()
        for step in range(self.steps):
            while len(self.issued) < (step + 1 + self.bound) * self.groups:
                self.issue_group()
            self.train(step)
            if 2 * (step + 1) == self.steps:
                self.evaluate(self.step_ends[-1] + PUBLISH_S, step=step + 1, passed=40, reads=0.7)
        stop = self.step_ends[-1] + 1.0
        self.decode(stop)
        if self.ended:
            self.evaluate(stop, step=self.steps, passed=69, reads=0.98)
            self.note(stop, "run_end", version=self.steps, reason="done", message="")
        for t, kind, columns in sorted(self.rows, key=lambda row: row[0]):
            self.out.add(t, kind, **columns)
        return self.out.close()

    def note(self, t: float, kind: str, **columns: Any) -> None:
        self.rows.append((t, kind, columns))

    def evaluate(self, t: float, *, step: int, passed: int, reads: float) -> None:
        rate = passed / 80
        counts = {"episodes": 80, "passed": passed, "failed": 0}
        known = {"heldout_pass_rate": rate, "reads_per_episode": reads}
        self.note(t, "eval", version=step, step=step, **known, **counts)

    def fail_once(self) -> None:
        """Five members of group 0 lose their sandbox at a first attempt."""
        for i in range(5):
            where = {"episode": f"lost-{i}", "group": 0, "attempt": -1}
            task = {"task": self.task.format(0), "member": i, "slot": i, "split": "train"}
            self.note(0.5, "issue", **where, **task, version=0, engine=ENGINE)
            end = {"status": "failed", "failure": ["environment", "worker_lost", ""]}
            sizes = {"reward": None, "spans": [], "tokens": 0, "action_tokens": 0, "turns": 0}
            times = {"t_submit": 0.5, "t_start": 0.5, "t_end": 0.8, "counters": {}}
            self.note(0.8, "finish", **where, **end, **sizes, **times)

    def issue_group(self) -> None:
        group = len(self.issued)
        batch = group // self.groups - self.bound - 1
        admitted = self.served[batch + 1][0] if batch >= 0 else START
        members = []
        for index in range(self.size):
            t, slot = heapq.heappop(self.free)
            t0 = max(t, admitted)
            t1 = t0 + min(9.0, self.rng.lognormvariate(0.55, 0.6))
            heapq.heappush(self.free, (t1, slot))
            members.append(Member(group=group, index=index, slot=slot, t0=t0, t1=t1))
        self.issued.append(members)
        for m in members:
            where = {"episode": m.id, "group": group, "attempt": 0, "engine": ENGINE}
            task = {"task": self.task_of(group), "member": m.index, "slot": m.slot}
            self.note(m.t0, "issue", **where, **task, split="train", version=max(0, batch + 1))

    def task_of(self, group: int) -> str:
        return self.task.format(group % 12)

    def train(self, step: int) -> None:
        taken = self.issued[step * self.groups : (step + 1) * self.groups]
        members = [m for group in taken for m in group]
        idle_since = self.step_ends[-1] + PUBLISH_S if self.step_ends else START
        t0 = max(idle_since, *(m.t1 for m in members))
        t1 = t0 + self.rng.uniform(1.7, 2.1)
        self.step_ends.append(t1)
        skill = 0.15 + 0.75 / (1 + math.exp((self.steps / 2.5 - step) / (self.steps / 9)))
        for m in members:
            self.finish(m, reward=float(self.rng.random() < skill))
        for group in taken:
            ids = [m.id for m in group]
            self.note(t0, "claim", group=group[0].group, version=step, step=step, episodes=ids)
        phases = {"score": 0.22, "attribution": 0.18, "update": 0.52}
        seconds = {name: share * (t1 - t0) for name, share in phases.items()}
        self.note(t1, "train", version=step + 1, step=step, t0=t0, t1=t1, phases=seconds)
        self.publish(step + 1, t1)
        self.note(t1, "commit", version=step + 1, step=step, episodes=[m.id for m in members])
        table = [_row(self.rng, m, step, self.task_of(m.group)) for m in members]
        if self.ended or step + 1 < self.steps:
            write_step(self.out.directory, step, table)
        self.out.ledger.record_metrics(step, _metrics(table))
        done = StepRow(step=step, version=step + 1, episodes=len(members), tokens=1, t0=t0, t1=t1)
        self.out.ledger.record_step(done)

    def finish(self, m: Member, *, reward: float) -> None:
        first = [v for t, v in self.served if t <= m.t0][-1]
        later = [v for t, v in self.served if m.t0 < t < m.t1]
        m.spans = [[v, ENGINE, 0, self.rng.randint(3, 7)] for v in (first, *later)]
        m.reward = reward
        n = sum(span[3] for span in m.spans)
        where = {"episode": m.id, "group": m.group, "attempt": 0}
        end = {"status": "done", "reward": reward, "failure": None, "spans": m.spans}
        sizes = {"tokens": 3 * n, "action_tokens": n, "turns": 2, "counters": {"reads": 1}}
        times = {"t_submit": m.t0, "t_start": m.t0, "t_end": m.t1}
        self.note(m.t1, "finish", **where, **end, **sizes, **times)

    def publish(self, version: int, t: float) -> None:
        digest = f"{self.rng.getrandbits(64):016x}"
        begun, served = t + PUBLISH_S, t + PUBLISH_S + self.rng.uniform(0.06, 0.1)
        self.served.append((served, version))
        size = {"digest": digest, "nbytes": 630_000, "n_changed": 157_000}
        self.note(begun, "publish", version=version, **size, t0=t, t1=begun)
        times = {"t_start": begun, "t_staged": served - 0.01, "t_end": served}
        who = {"engine": ENGINE, "version": version, "epoch": 0, "digest": digest}
        self.note(served, "apply", **who, **times, tokens_recomputed=900)
        self.out.ledger.record_version(VersionRow(version=version, **size))

    def decode(self, stop: float) -> None:
        t = START
        while t < stop:
            stretches = []
            for _ in range(40):
                end = t + self.rng.uniform(0.02, 0.2)
                stretches.append([t, end, 30, 10, 4])
                t = end + self.rng.choice((0.0, 0.0, 0.01, 0.03))
            self.note(min(t, stop), "activity", engine=ENGINE, stretches=stretches)


def _row(rng: random.Random, m: Member, step: int, task: str) -> EpisodeRow:
    """Tokens whose staleness part grows with their lag, on an engine with a floor of 6e-4 nats."""
    ids: list[int] = []
    action: list[int] = []
    turn: list[int] = []
    spans: list[Span] = []
    lags: list[int] = []
    for index, (version, engine, epoch, tokens) in enumerate(m.spans):
        world = rng.randint(8, 14)
        ids += [rng.randrange(WORDS) for _ in range(world + tokens)]
        action += [0] * world + [1] * tokens
        turn += [index] * (world + tokens)
        start = len(lags)
        lags += [step - version] * tokens
        spans.append(
            Span(
                start=start,
                stop=len(lags),
                version=version,
                engine=engine,
                epoch=epoch,
                precision="float32",
            )
        )
    target = [-abs(rng.gauss(0, 1.0)) for _ in lags]
    at_version = [
        min(0.0, x + rng.gauss(0, 0.03 * lag) * math.exp(rng.gauss(0, 0.8)))
        for x, lag in zip(target, lags, strict=True)
    ]
    behaviour = [min(0.0, x + rng.gauss(0, 0.0006)) for x in at_version]
    segment = Segment(
        token_ids=array("i", ids),
        action=array("b", action),
        turn=array("i", turn),
        logp_behaviour=array("f", behaviour),
        spans=tuple(spans),
    )
    episode = Episode(
        id=m.id,
        task=task,
        group=m.group,
        member=m.index,
        attempt=0,
        segments=(segment,),
        turns=(),
        status=EpisodeStatus.DONE,
        reward=m.reward,
    )
    return EpisodeRow(
        episode=episode,
        logp_target=target,
        logp_version=at_version,
        weight=[min(2.0, math.exp(t - b)) for t, b in zip(target, behaviour, strict=True)],
        keep=[True] * len(lags),
        advantage=[1.0] * len(lags),
        lag_in_flight=[lag - lags[-1] for lag in lags],
        lag_in_queue=[lags[-1]] * len(lags),
    )


def _metrics(table: list[EpisodeRow]) -> dict[str, Metric]:
    d: list[float] = []
    for row in table:
        assert row.logp_target is not None
        behaviour = row.episode.segments[0].logp_behaviour
        d += [t - b for t, b in zip(row.logp_target, behaviour, strict=True)]
    ratio = [math.exp(x) for x in d]
    return {
        "gap/abs_log_ratio": Metric.of(sum(map(abs, d)) / len(d)),
        "ess/raw_tokens": Metric.of(_ess(ratio)),
        "ess/applied_tokens": Metric.of(_ess([min(2.0, r) for r in ratio])),
        "kept/tokens": Metric.of(1.0),
    }


def _ess(weights: list[float]) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))
