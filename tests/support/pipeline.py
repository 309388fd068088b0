"""A controller on logical time with scripted engines: everything real but tokens and weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from support.dialogues import STOP, FakeWorld, NumberDialogue
from trueup.config import Config, load
from trueup.engines.base import Engine
from trueup.engines.scripted import Reply, ScriptedEngine
from trueup.environments.base import Step
from trueup.errors import EngineFault
from trueup.records.directory import RunDirectory
from trueup.records.ledger import Ledger
from trueup.records.schema import Event
from trueup.records.tokens import EpisodeRow, write_step
from trueup.scheduling import Scheduler, decode, encode, rules_from_dict
from trueup.training.clock import run as run_on_clock
from trueup.training.controller import Controller
from trueup.training.messages import (
    Consumed,
    Discarded,
    EpisodeSpec,
    MetricValue,
    ProbeReport,
    StepReport,
)
from trueup.training.payload import PayloadStore
from trueup.training.ports import Start
from trueup.training.probe import ProbeSet
from trueup.training.progress import Progress
from trueup.training.recorder import Recorder, engine_id
from trueup.training.rollout import Rollout
from trueup.types import GenerateRequest, LoadReceipt, Task, WeightManifest

SMALL = (
    "train.groups_per_step=2",
    "train.samples_per_group=2",
    "train.steps=6",
    "engine.slots=8",
    "engine.max_tokens=1000000000",
    "eval.samples=0",
    "checkpoint.every=1000",
)
"""Two groups of two per step, no evaluation, no checkpoint but the last."""


class Attempt(NamedTuple):
    """What decides how long an attempt takes and how it ends."""

    draw: int
    round: int
    """How often its task had been issued before."""
    member: int
    attempt: int


def manifest(version: int) -> WeightManifest:
    """A version without tensors."""
    return WeightManifest(
        version=version,
        transport="none",
        location="",
        digest=f"digest of {version}",
        tensors=(),
        nbytes=0,
        n_changed=1,
    )


@dataclass
class FakeLearner:
    """Takes `train_s` per step and writes the episode table; learns where `learns` says so."""

    run: RunDirectory
    store: PayloadStore
    version: int = 0
    train_s: float = 5.0
    learns: Callable[[int], bool] = lambda step: True
    fault: Callable[[int], Exception | None] = lambda step: None
    metrics: tuple[MetricValue, ...] = ()
    consumed: dict[int, tuple[Consumed, ...]] = field(default_factory=dict)
    """By step."""
    discarded: list[Discarded] = field(default_factory=list)
    checkpoints: dict[int, dict[str, Any]] = field(default_factory=dict)
    retired: list[int] = field(default_factory=list)
    loads: list[tuple[str, int, tuple[str, ...]]] = field(default_factory=list)
    """(engine, version, probe) of each load that was judged."""
    alarms: Callable[[LoadReceipt], tuple[tuple[str, str], ...]] = lambda receipt: ()

    async def publish(self) -> WeightManifest:
        return manifest(self.version)

    async def update(
        self, step: int, consumed: Sequence[Consumed], discarded: Sequence[Discarded]
    ) -> StepReport:
        await asyncio.sleep(self.train_s)
        if error := self.fault(step):
            raise error
        episodes = [self.store.get(item.episode) for item in consumed]
        self.consumed[step] = tuple(consumed)
        self._write(step, [EpisodeRow(episode=episode) for episode in episodes], discarded)
        learned = self.learns(step)
        self.version += learned
        return StepReport(
            step=step,
            version=self.version,
            manifest=manifest(self.version) if learned else None,
            episodes=tuple(item.episode for item in consumed),
            tokens=0,
            metrics=self.metrics,
            phases={},
            t0=0.0,
            t1=1.0,
            t_publish=(1.0, 1.0),
        )

    async def probed(self, receipt: LoadReceipt, episodes: Sequence[str]) -> ProbeReport:
        self.loads.append((receipt.engine, receipt.version, tuple(episodes)))
        for episode in episodes:
            self.store.discard(episode)
        return ProbeReport(
            engine=receipt.engine,
            epoch=receipt.epoch,
            version=receipt.version,
            tokens=12 * len(episodes),
            alarms=self.alarms(receipt),
        )

    async def record(self, step: int, discarded: Sequence[Discarded]) -> None:
        self._write(step, [], discarded)

    async def checkpoint(self, step: int, state: dict[str, Any]) -> tuple[str, str]:
        self.checkpoints[step] = {**state, "version": self.version}
        return f"checkpoints/step-{step:06d}", "digest"

    async def retire(self, version: int) -> None:
        self.retired.append(version)

    def _write(self, step: int, rows: list[EpisodeRow], discarded: Sequence[Discarded]) -> None:
        self.discarded += discarded
        left = [
            EpisodeRow(episode=self.store.get(item.episode), reason=item.reason)
            for item in discarded
        ]
        write_step(self.run, step, [*rows, *left])
        for row in [*rows, *left]:
            self.store.discard(row.episode.id)


@dataclass
class Pipeline:
    """One life of a run; an engine says a token per second."""

    root: Path
    overrides: tuple[str, ...] = ()
    tokens: Callable[[Attempt], int] = lambda attempt: 3
    outcome: Callable[[Attempt], float | Exception] = lambda attempt: float(attempt.member % 2)
    """A reward, or what the world raises."""
    tasks: int = 7
    heldout: int = 3
    start: Start = field(default_factory=Start)
    load_s: tuple[float, ...] = (0.5,)
    """Of each engine, in turn."""
    world_s: Callable[[Attempt], float] = lambda attempt: 0.0
    """How long a world acts, which nothing interrupts."""
    verify: Callable[[WeightManifest], None] | None = None
    probes: ProbeSet | None = None
    broken: EngineFault | None = None
    """What engines raise instead of decoding a probe."""
    learner: FakeLearner = field(init=False)
    engines: list[ScriptedEngine] = field(init=False)
    controller: Controller = field(init=False)
    progress: list[Progress] = field(default_factory=list)
    on_step: Callable[[Pipeline, Progress], None] = lambda pipeline, progress: None
    specs: list[EpisodeSpec] = field(default_factory=list)
    """Of every attempt, in order."""

    def __post_init__(self) -> None:
        self.config: Config = load("", (*SMALL, *self.overrides))
        if not self.start.resumed_from:
            Ledger.create(RunDirectory.create(self.root, "run").ledger).close()
        self.run = RunDirectory.open(self.root / "run")
        self.store = PayloadStore(self.run.path)
        self.learner = FakeLearner(self.run, self.store, version=self.start.version)
        self.engines = [
            ScriptedEngine(
                self._reply,
                engine_id=engine_id(index),
                epoch=len(self.events("run_start", "resume")),
                verify=self.verify,
                load_s=self.load_s[index % len(self.load_s)],
            )
            for index in range(self.config.engine.count)
        ]

    def play(self) -> str:
        """Run to the end; raises the fault that stopped it."""
        ledger = Ledger.open(self.run.ledger)
        try:
            return run_on_clock(self._play(Recorder(ledger)), logical=True)
        finally:
            ledger.close()

    async def _play(self, recorder: Recorder) -> str:
        engines: list[Engine] = list(self.engines)
        self.rollout = Rollout(
            engines,
            self._world,
            NumberDialogue(),
            self.store,
            max_turns=1,
            max_tokens=self.config.engine.max_tokens,
            probes=self.probes,
        )
        self.controller = Controller(
            self.config,
            recorder,
            engines=engines,
            rollout=self.rollout,
            learner=self.learner,
            tasks=[Task(id=f"t{i}", split="train") for i in range(self.tasks)],
            heldout=[Task(id=f"h{i}", split="heldout") for i in range(self.heldout)],
            start=self.start,
            on_step=self._on_step,
        )
        return await self.controller.run()

    def resumed(self, step: int, **changes: Any) -> Pipeline:
        """The next life of this run, from a checkpoint of this one."""
        state = self.learner.checkpoints[step]
        attempts: dict[int, list[str]] = {}
        for event in self.events("issue"):
            attempts.setdefault(event.group, []).append(event.episode)
        settled = {event.group for event in self.events("claim", "drop")}
        start = Start(
            step=state["step"],
            version=state["version"],
            group=max(attempts) + 1,
            stream=state["stream"],
            resumed_from=f"checkpoints/step-{step:06d}",
            abandoned=tuple((g, tuple(a)) for g, a in attempts.items() if g not in settled),
        )
        values = {
            "overrides": self.overrides,
            "tokens": self.tokens,
            "outcome": self.outcome,
            **changes,
        }
        return Pipeline(self.root, start=start, **values)

    # ---- what the tests read

    def events(self, *kinds: str) -> list[Event]:
        """Rows of the ledger."""
        ledger = Ledger.open(self.run.ledger, readonly=True)
        try:
            return list(ledger.events(kinds or None))
        finally:
            ledger.close()

    @property
    def evaluated(self) -> list[EpisodeSpec]:
        """Attempts at held-out tasks."""
        return [spec for spec in self.specs if not spec.store]

    def lags(self) -> list[list[int]]:
        """For every episode that was consumed, the lag of each of its spans."""
        spans = {event.episode: event.payload["spans"] for event in self.events("finish")}
        return [
            [event.version - span[0] for span in spans[episode]]
            for event in self.events("claim")
            for episode in event.payload["episodes"]
        ]

    def draws_consumed(self) -> list[int]:
        """Draws of the task stream in the order in which steps consumed them."""
        draws = {event.group: event.payload["stream"] for event in self.events("close")}
        return [draws[event.group] for event in self.events("claim")]

    def replayed(self) -> tuple[list[Any], list[Any]]:
        """Recorded actions of every tick, and those of fresh schedulers told the same events."""
        recorded, replayed = [], []
        scheduler: Scheduler
        for event in self.events("run_start", "resume", "tick"):
            if event.kind != "tick":
                scheduler = Scheduler(rules_from_dict(event.payload["schedule"]))
                continue
            recorded.append(event.payload["actions"])
            actions = encode(scheduler.advance(*decode(event.payload["events"])))
            replayed.append([[*map(_as_json, action)] for action in actions])
        return recorded, replayed

    # ---- what the parts are told

    def _reply(self, request: GenerateRequest) -> Reply:
        if request.session.startswith("probe"):
            n = request.sampling.max_tokens
            return Reply(token_ids=[7] * n, logps=[-0.5] * n, token_s=1.0, fault=self.broken)
        _, draw, times, member, attempt, _ = request.sampling.key
        n = self.tokens(Attempt(draw, times, member, attempt))
        return Reply(token_ids=[*[7] * (n - 1), STOP], logps=[-0.5] * n, token_s=1.0)

    def _world(self, spec: EpisodeSpec) -> FakeWorld:
        self.specs.append(spec)
        attempt = Attempt(*spec.key[1:])
        result = self.outcome(attempt)
        if not isinstance(result, Exception):
            result = Step(observation="", done=True, reward=result)
        return FakeWorld([result], before_step=lambda: asyncio.sleep(self.world_s(attempt)))

    def _on_step(self, progress: Progress) -> None:
        self.progress.append(progress)
        self.on_step(self, progress)


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
