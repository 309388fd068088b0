"""Writes run directories without running anything: by hand, or as a small simulated run."""

from __future__ import annotations

import heapq
import math
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trueup.config import as_toml, load
from trueup.diagnostics.metrics import Metric
from trueup.records.directory import RunDirectory
from trueup.records.ledger import Ledger, StepRow, VersionRow
from trueup.records.manifest import build_manifest, write_manifest
from trueup.records.tokens import EpisodeRow, write_step
from trueup.types import Episode, EpisodeStatus, Segment, Span, Turn


@dataclass
class RunWriter:
    """A run directory under construction; times are seconds since the start."""

    root: Path
    name: str = "demo"
    overrides: tuple[str, ...] = ()
    directory: RunDirectory = field(init=False)
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        self.directory = RunDirectory.create(self.root, self.name)
        self.directory.config.write_text(as_toml(load("", self.overrides)))
        self.ledger = Ledger.create(self.directory.ledger)

    @property
    def path(self) -> Path:
        return self.directory.path

    def add(self, t: float, kind: str, *, actor: str = "controller", **columns: Any) -> None:
        keys = ("episode", "attempt", "group", "version", "engine")
        plain = {key: columns.pop(key) for key in keys if key in columns}
        self.ledger.append(kind, actor=actor, t_mono=t, payload=columns, **plain)

    def issue(
        self, t: float, episode: str, *, version: int = 0, slot: int = 0, **more: Any
    ) -> None:
        known = {"group": 0, "member": 0, "attempt": 0, "task": "a", "split": "train"}
        columns = known | {"engine": "engine-0"} | more
        self.add(t, "issue", episode=episode, version=version, slot=slot, **columns)

    def finish(
        self, t: float, episode: str, *, spans: list[list[Any]], reward: float | None, **more: Any
    ) -> None:
        tokens = sum(span[3] for span in spans)
        known = {"group": 0, "attempt": 0, "status": "done", "failure": None, "turns": 1}
        sizes = {"tokens": 2 * tokens, "action_tokens": tokens, "counters": {}}
        times = {"t_submit": t, "t_start": t, "t_end": t}
        columns = known | sizes | times | more
        self.add(t, "finish", episode=episode, spans=spans, reward=reward, **columns)

    def close(self) -> Path:
        self.ledger.close()
        return self.path


@pytest.fixture
def writer(tmp_path: Path) -> Callable[..., RunWriter]:
    def make(name: str = "demo", *overrides: str) -> RunWriter:
        return RunWriter(tmp_path, name, overrides)

    return make


@pytest.fixture
def simulated(tmp_path: Path) -> Callable[..., Path]:
    return lambda **more: simulate(tmp_path, **more)


def episode_row(
    name: str,
    *,
    task: str = "a",
    group: int = 0,
    reward: float | None = 1.0,
    version: int = 0,
    step_version: int = 0,
    staleness: float = 0.0,
    engine: float = 0.0,
    weight: float = 1.0,
    world: int = 3,
    actions: int = 4,
    trained: bool = True,
) -> EpisodeRow:
    """A segment of `world` tokens and `actions` action tokens with constant parts of the gap."""
    lag = step_version - version
    target = [-1.0 - 0.1 * i for i in range(actions)]
    at_version = [x - staleness for x in target]
    behaviour = [x - engine for x in at_version]
    segment = Segment(
        token_ids=array("i", range(world + actions)),
        action=array("b", [0] * world + [1] * actions),
        turn=array("i", [0] * (world + actions)),
        logp_behaviour=array("f", behaviour),
        spans=(
            Span(
                start=0,
                stop=actions,
                version=version,
                engine="engine-0",
                epoch=0,
                precision="float32",
            ),
        ),
    )
    episode = Episode(
        id=name,
        task=task,
        group=group,
        member=0,
        attempt=0,
        segments=(segment,),
        turns=(Turn(t_start=0.0, t_end=1.0, tokens_in=world, tokens_out=actions),),
        status=EpisodeStatus.DONE,
        reward=reward,
    )
    if not trained:
        return EpisodeRow(episode=episode, reason="stale")
    return EpisodeRow(
        episode=episode,
        logp_target=target,
        logp_version=at_version,
        weight=[weight] * actions,
        keep=[True] * actions,
        advantage=[0.5] * actions,
        lag_in_flight=[min(1, lag)] * actions,
        lag_in_queue=[lag - min(1, lag)] * actions,
    )


def simulate(
    root: Path,
    *,
    name: str = "tiny-async",
    steps: int = 24,
    slots: int = 48,
    group_size: int = 8,
    groups: int = 6,
    bound: int = 2,
    seed: int = 0,
    task: str = "repair-{}",
    words: str = "",
    ended: bool = True,
) -> Path:
    """A plausible asynchronous run: log-normal episodes, a trainer, an engine, swaps in flight."""
    rng = random.Random(seed)
    run = RunWriter(
        root,
        name,
        (
            f"schedule.staleness={bound}",
            f"train.steps={steps}",
            f"engine.slots={slots}",
            f"train.groups_per_step={groups}",
        ),
    )
    rows: list[tuple[float, str, dict[str, Any]]] = [(0.0, "run_start", {"schedule": {}})]
    write_manifest(
        run.directory.manifest, build_manifest(seeds={"run": seed}, command=["simulate"])
    )
    versions = [(0.0, 0)]  # when the engine began to serve each version
    free = [(0.0, slot) for slot in range(slots)]
    heapq.heapify(free)
    episodes: list[dict[str, Any]] = []
    buffered: list[list[dict[str, Any]]] = []
    trainer_free, step = 1.0, 0
    committed_at: list[float] = []
    rows.append(
        (
            1.0,
            "eval",
            {
                "version": 0,
                "step": 0,
                "heldout_pass_rate": 0.15,
                "reads_per_episode": 0.21,
                "episodes": 80,
                "passed": 12,
            },
        )
    )
    group = 0
    while step < steps:
        while group < (step + 1 + bound) * groups:
            members = []
            gate = committed_at[group // groups - bound - 1] if group // groups > bound else 1.0
            for member in range(group_size):
                t, slot = heapq.heappop(free)
                t = max(t, gate)
                end = t + min(9.0, rng.lognormvariate(0.55, 0.6))
                heapq.heappush(free, (end, slot))
                members.append(
                    {
                        "group": group,
                        "member": member,
                        "slot": slot,
                        "t0": t,
                        "t1": end,
                        "episode": f"g{group}-m{member}",
                    }
                )
            buffered.append(members)
            episodes += members
            group += 1
        buffered.sort(key=lambda g: max(m["t1"] for m in g))
        taken, buffered = buffered[:groups], buffered[groups:]
        ready = max(m["t1"] for g in taken for m in g)
        t0 = max(trainer_free, ready)
        t1 = t0 + rng.uniform(1.7, 2.1)
        trainer_free = t1 + 0.06
        committed_at.append(t1)
        served = t1 + 0.06 + rng.uniform(0.06, 0.1)
        versions.append((served, step + 1))
        table: list[EpisodeRow] = []
        trained = []
        skill = 0.15 + 0.75 / (1 + math.exp(-(step - steps / 2.5) / (steps / 9)))
        for g in taken:
            for m in g:
                m["reward"] = float(rng.random() < skill)
            graded = len({m["reward"] for m in g}) > 1
            for m in g:
                cuts = [v for t, v in versions if t <= m["t0"]][-1:] + [
                    v for t, v in versions if m["t0"] < t < m["t1"]
                ]
                m["spans"] = [[v, "engine-0", 0, rng.randint(3, 7)] for v in cuts]
                if graded:
                    trained.append(m["episode"])
                    table.append(_row(rng, m, step, task.format(m["group"] % 12), steps))
            rows.append(
                (
                    t0,
                    "claim",
                    {
                        "group": g[0]["group"],
                        "version": step,
                        "step": step,
                        "episodes": [m["episode"] for m in g],
                    },
                )
            )
            if not graded:
                rows.append(
                    (
                        t0,
                        "drop",
                        {
                            "group": g[0]["group"],
                            "version": step,
                            "reason": "zero_variance",
                            "episodes": [m["episode"] for m in g],
                        },
                    )
                )
        busy = t1 - t0
        rows.append(
            (
                t1,
                "train",
                {
                    "version": step,
                    "step": step,
                    "t0": t0,
                    "t1": t1,
                    "phases": {
                        "score": busy * 0.22,
                        "attribution": busy * 0.18,
                        "update": busy * 0.52,
                    },
                },
            )
        )
        rows.append((t1, "commit", {"version": step + 1, "step": step, "episodes": trained}))
        rows.append(
            (
                t1 + 0.06,
                "publish",
                {
                    "version": step + 1,
                    "digest": f"{rng.getrandbits(64):016x}",
                    "nbytes": 630000,
                    "n_changed": 157000,
                    "t0": t1,
                    "t1": t1 + 0.06,
                },
            )
        )
        rows.append(
            (
                served,
                "apply",
                {
                    "engine": "engine-0",
                    "version": step + 1,
                    "epoch": 0,
                    "digest": rows[-1][2]["digest"],
                    "t_start": t1 + 0.06,
                    "t_staged": served - 0.01,
                    "t_end": served,
                    "tokens_recomputed": 900,
                },
            )
        )
        if ended or step < steps - 1:
            write_step(run.directory, step, table)
        d = [t - b for row in table for t, b in _pairs(row)]
        ratio = [math.exp(x) for x in d]
        applied = [min(2.0, r) for r in ratio]
        run.ledger.record_metrics(
            step,
            {
                "gap/abs_log_ratio": Metric.of(sum(map(abs, d)) / len(d)),
                "ess/raw_tokens": Metric.of(_ess(ratio)),
                "ess/applied_tokens": Metric.of(_ess(applied)),
                "kept/tokens": Metric.of(1.0),
            },
        )
        run.ledger.record_version(
            VersionRow(
                version=step + 1, digest=rows[-2][2]["digest"], n_changed=157000, nbytes=630000
            )
        )
        run.ledger.record_step(
            StepRow(step=step, version=step + 1, episodes=len(trained), tokens=1, t0=t0, t1=t1)
        )
        step += 1
        if step == steps // 2:
            rows.append(
                (
                    trainer_free,
                    "eval",
                    {
                        "version": step,
                        "step": step,
                        "heldout_pass_rate": 0.5,
                        "reads_per_episode": 0.7,
                        "episodes": 80,
                        "passed": 40,
                    },
                )
            )
    stop = trainer_free + 1
    for m in episodes:
        where = {"episode": m["episode"], "group": m["group"], "attempt": 0}
        began = [v for t, v in versions if t <= m["t0"]][-1]
        rows.append(
            (
                m["t0"],
                "issue",
                where
                | {
                    "engine": "engine-0",
                    "version": began,
                    "task": task.format(m["group"] % 12),
                    "member": m["member"],
                    "slot": m["slot"],
                    "split": "train",
                },
            )
        )
        if "spans" in m:
            n = sum(s[3] for s in m["spans"])
            rows.append(
                (
                    m["t1"],
                    "finish",
                    where
                    | {
                        "status": "done",
                        "reward": m["reward"],
                        "failure": None,
                        "tokens": 3 * n,
                        "action_tokens": n,
                        "turns": 2,
                        "counters": {"reads": 1},
                        "spans": m["spans"],
                        "t_submit": m["t0"],
                        "t_start": m["t0"],
                        "t_end": m["t1"],
                    },
                )
            )
    for i in range(5):  # five members of group 0 whose sandbox died at their first attempt
        where = {"episode": f"g0-m{i}", "group": 0, "attempt": -1}
        more = {"version": 0, "slot": i, "task": task.format(0), "member": i, "split": "train"}
        failure = {"kind": "environment", "reason": "worker_lost", "message": ""}
        none = {"reward": None, "spans": [], "tokens": 0, "action_tokens": 0, "turns": 0}
        times = {"t_submit": 0.5, "t_start": 0.5, "t_end": 0.8, "counters": {}}
        rows.append((0.5, "issue", where | more | {"engine": "engine-0"}))
        ended_row = where | none | times | {"status": "failed", "failure": failure}
        rows.append((0.8, "finish", ended_row))
    t = 1.0
    while t < stop:
        stretches = []
        for _ in range(40):
            width = rng.uniform(0.02, 0.2)
            stretches.append([t, t + width, 30, 10, 4])
            t += width + rng.choice((0.0, 0.0, 0.01, 0.03))
        rows.append((min(t, stop), "activity", {"engine": "engine-0", "stretches": stretches}))
    if ended:
        rows.append(
            (
                stop,
                "eval",
                {
                    "version": steps,
                    "step": steps,
                    "heldout_pass_rate": 0.8625,
                    "reads_per_episode": 0.98,
                    "episodes": 80,
                    "passed": 69,
                },
            )
        )
        rows.append((stop, "run_end", {"version": steps, "reason": "done", "message": ""}))
    for t, kind, columns in sorted(rows, key=lambda row: row[0]):
        run.add(t, kind, **columns)
    if words:
        folder = run.directory.checkpoint(steps)
        folder.mkdir()
        (folder / "tokenizer.json").write_text(words)
    return run.close()


def _row(rng: random.Random, m: dict[str, Any], step: int, task: str, steps: int) -> EpisodeRow:
    n = sum(span[3] for span in m["spans"])
    ids, action, turn, spans, at = [], [], [], [], 0
    for index, (version, engine, epoch, tokens) in enumerate(m["spans"]):
        world = rng.randint(8, 14)
        ids += [rng.randrange(60) for _ in range(world + tokens)]
        action += [0] * world + [1] * tokens
        turn += [index] * (world + tokens)
        spans.append(
            Span(
                start=at,
                stop=at + tokens,
                version=version,
                engine=engine,
                epoch=epoch,
                precision="float32",
            )
        )
        at += tokens
    lags = [step - v for v, _, _, tokens in m["spans"] for _ in range(tokens)]
    last = m["spans"][-1][0]
    queue = [max(0, min(lag, step - last)) for lag in lags]
    target = [-abs(rng.gauss(0, 1.0)) for _ in range(n)]
    at_version = [
        x + rng.gauss(0, 0.012 + 0.03 * lag) * math.exp(rng.gauss(0, 0.8))
        for x, lag in zip(target, lags, strict=True)
    ]
    at_version = [min(0.0, x) for x in at_version]
    behaviour = [min(0.0, x + rng.gauss(0, 0.0006)) for x in at_version]
    weight = [min(2.0, math.exp(t - b)) for t, b in zip(target, behaviour, strict=True)]
    segment = Segment(
        token_ids=array("i", ids),
        action=array("b", action),
        turn=array("i", turn),
        logp_behaviour=array("f", behaviour),
        spans=tuple(spans),
    )
    episode = Episode(
        id=m["episode"],
        task=task,
        group=m["group"],
        member=m["member"],
        attempt=0,
        segments=(segment,),
        turns=(),
        status=EpisodeStatus.DONE,
        reward=m["reward"],
    )
    return EpisodeRow(
        episode=episode,
        logp_target=target,
        logp_version=at_version,
        weight=weight,
        keep=[True] * n,
        advantage=[1.0] * n,
        lag_in_flight=[a - b for a, b in zip(lags, queue, strict=True)],
        lag_in_queue=queue,
    )


def _pairs(row: EpisodeRow) -> list[tuple[float, float]]:
    assert row.logp_target is not None
    return list(zip(row.logp_target, row.episode.segments[0].logp_behaviour, strict=True))


def _ess(weights: list[float]) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


@pytest.fixture
def row() -> Callable[..., EpisodeRow]:
    return episode_row
